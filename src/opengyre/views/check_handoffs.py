"""P6 and P16 of prefixes that one engine keeps for another: what was read, and that all end.

Must not know: engines, gateways. Each row is seen once, in order. Invariants: a reference is told
of in the order offered, acknowledged, taken over, released, and of nothing after that; it may be
offered again, elsewhere, as long as nobody took it over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from opengyre.control import facts as f
from opengyre.seams.kv import HandoffStage
from opengyre.seams.records import Span
from opengyre.store import observations as seen
from opengyre.store.journal import Row
from opengyre.views.findings import CheckResult, Findings
from opengyre.views.handoffs import handoff_words
from opengyre.views.run_state import RunState


@dataclass(slots=True, kw_only=True)
class _Ref:
    """One reference: where it stands. `offered_to` "": nobody reads it now; that engine had loaded
    `offered_at` when it was offered, if it was told of, and `published` was since."""

    first: seen.Handoff
    offered_to: str = ""
    offered_at: int | None = None
    is_acknowledged: bool = False
    num_read_tokens: int = 0
    is_taken_over: bool = False
    is_released: bool = False
    was_offered: bool = False
    is_excused: bool = False
    published: list[seen.VersionPublished] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return bool(self.offered_to) and not self.is_acknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakenOver:
    """The first ids at `engine` follow `place` tokens of the turn."""

    ref: str
    key: tuple[str, int]
    engine: str
    version: int
    place: int


class HandoffChecks:
    """`finish` gives P6 and P16."""

    def __init__(self) -> None:
        self._refs: dict[str, _Ref] = {}
        self._version_at: dict[str, int] = {}
        self._moved: dict[tuple[str, int], seen.Continued] = {}
        self._taken_over: list[_TakenOver] = []
        self._num_told_late = 0
        self._read = Findings(
            promise="P6", words="no keys and values of another version were read", unit="imports"
        )
        self._ended = Findings(
            promise="P16",
            words="every prefix kept for another engine was released, and nothing followed",
            unit="prefixes",
        )

    def see(self, row: Row, state: RunState) -> None:
        match row.value:
            case seen.Handoff():
                self._see_handoff(row.seq, row.value, state)
            case f.EngineReady():
                self._version_at[row.value.engine] = row.value.version
            case seen.VersionPublished():
                self._version_at[row.value.engine] = row.value.version
                for ref in self._refs.values():
                    if ref.is_open:
                        ref.published.append(row.value)
            case seen.Continued():
                self._moved[row.value.turn, row.value.attempt] = row.value
            case seen.GatewayLost():
                self._excuse(row.value.executions)
                self._forget_cut_calls(row.value.executions, state)
            case _:
                return

    def finish(self, state: RunState) -> tuple[CheckResult, CheckResult]:
        for one in self._taken_over:
            record = state.turns.get(one.key)
            problem = None if record is None else _sampled_problem(one, record.spans)
            if problem is not None:
                self._read.broken(f"{one.key[0]}: {one.ref}: {problem}")
        num_left = 0
        for name, ref in self._refs.items():
            execution = state.executions.get(ref.first.execution)
            is_over = execution is not None and execution.closed_s is not None
            num_left += not ref.is_released
            if ref.is_released or (ref.was_offered and is_over and not ref.is_excused):
                self._ended.expect(ref.is_released, f"{name} was never released")
        if num_left:
            self._ended.notes.append(f"{num_left} not released when the journal or a gateway ended")
        if self._num_told_late:
            words = "acknowledged after a publication at their source or reader"
            self._read.notes.append(f"{self._num_told_late} {words}")
        self._ended.notes += handoff_words(state)
        return self._read.result(), self._ended.result()

    def _excuse(self, executions: Sequence[str]) -> None:
        """Who would have told of them is dead; their leases end by themselves."""
        lost = set(executions)
        for ref in self._refs.values():
            if ref.first.execution in lost:
                ref.is_excused = True

    def _forget_cut_calls(self, executions: Sequence[str], state: RunState) -> None:
        """Calls that ended with their gateway: the next ones of that name are others."""
        lost = set(executions)
        self._taken_over = [
            one
            for one in self._taken_over
            if one.key in state.turns or self._refs[one.ref].first.execution not in lost
        ]

    def _see_handoff(self, seq: int, told: seen.Handoff, state: RunState) -> None:
        source = state.engines.get(told.from_engine)
        if told.ref not in self._refs and source is not None and source.cell is None:
            words = "it never leaves, and a publication hands nothing over"
            self._read.broken(f"{told.from_engine} kept {told.ref}: {words}")
        ref = self._refs.setdefault(told.ref, _Ref(first=told))
        if (problem := _about_problem(ref, told) or self._stage_problem(ref, told)) is not None:
            self._ended.broken(f"row {seq}: {told.ref} {told.stage.value}: {problem}")

    def _stage_problem(self, ref: _Ref, told: seen.Handoff) -> str | None:
        if ref.is_released:
            return "it was released before"
        match told.stage:
            case HandoffStage.OFFERED:
                ref.offered_to, ref.is_acknowledged, ref.was_offered = told.to_engine, False, True
                ref.offered_at, ref.published = self._version_at.get(told.to_engine), []
                return "it was taken over before" if ref.is_taken_over else None
            case HandoffStage.ACKNOWLEDGED:
                return self._acknowledge(ref, told)
            case HandoffStage.TAKEN_OVER:
                return self._take_over(ref, told)
            case HandoffStage.RELEASED:
                ref.is_released = True
                return None

    def _acknowledge(self, ref: _Ref, told: seen.Handoff) -> str | None:
        if not ref.is_open or told.to_engine != ref.offered_to:
            return f"{told.to_engine} was not offered it"
        ref.is_acknowledged, ref.num_read_tokens = True, told.num_tokens
        if not 0 <= told.num_tokens <= ref.first.num_tokens:
            return f"{told.num_tokens} of {ref.first.num_tokens} tokens"
        if told.num_tokens > 0:
            self._check_read(ref, told)
        return None

    def _check_read(self, ref: _Ref, told: seen.Handoff) -> None:
        """A gateway tells an offer before it shuts a door, so what its reader had loaded by then it
        reads under. A publication after the offer may be told of before what was read."""
        is_stale = ref.offered_at is not None and ref.offered_at > told.version
        words = f"{told.to_engine} read {told.ref} of version {told.version}"
        self._read.expect(not is_stale, f"{words}, it had loaded {ref.offered_at}")
        both = (told.from_engine, told.to_engine)
        others = [one for one in ref.published if one.version != told.version]
        self._num_told_late += any(one.engine in both for one in others)

    def _take_over(self, ref: _Ref, told: seen.Handoff) -> str | None:
        if ref.is_taken_over:
            return "it was taken over before"
        if not told.turn:
            return "an idle prefix has no turn that could"
        if not ref.is_acknowledged or told.to_engine != ref.offered_to:
            return f"{told.to_engine} did not acknowledge it"
        ref.is_taken_over = True
        moved = self._moved.get((told.turn, told.attempt))
        is_moved_there = moved is not None and moved.to_engine == told.to_engine
        if moved is not None and is_moved_there and ref.num_read_tokens > 0:
            self._taken_over.append(
                _TakenOver(
                    ref=told.ref,
                    key=(told.turn, told.attempt),
                    engine=told.to_engine,
                    version=told.version,
                    place=moved.num_tokens_so_far,
                )
            )
        return None


def _about_problem(ref: _Ref, told: seen.Handoff) -> str | None:
    """Every row of a reference is about the same prefix."""
    first = ref.first
    for name in ("execution", "turn", "attempt", "from_engine", "version"):
        if getattr(told, name) != getattr(first, name):
            return f"its {name} was {getattr(first, name)}, is {getattr(told, name)}"
    return None


def _sampled_problem(one: _TakenOver, spans: Sequence[Span]) -> str | None:
    """What a reader samples is of the version that it read."""
    for span in spans:
        if span.start <= one.place < span.end:
            if span.engine == one.engine and span.policy_version == one.version:
                return None
            where = f"{span.engine} sampled under version {span.policy_version}"
            return f"of version {one.version} taken over at {one.engine}, {where}"
    return None
