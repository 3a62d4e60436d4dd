"""P5 and P10 from the token segments: unbroken turns, and training ids that are engine ids.

Must not know: engines, renderers, the trainer. Invariant: everything is restored from segment
bytes; the journal only says where they are and what was trained.
"""

import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from opengyre.control.ids import cell_engine_id
from opengyre.seams.errors import BoundaryError
from opengyre.seams.records import Span, TokenRecord, TurnRecord
from opengyre.store import observations as seen
from opengyre.store.segments import SegmentReader
from opengyre.views.findings import CheckResult, Findings
from opengyre.views.run_state import RunState

ByTurn = dict[tuple[str, int], "Restored"]
CORE_ENGINE = cell_engine_id(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """All ids of a turn: prompt, then completion; `is_sampled` and `logprobs` beside each."""

    ids: "array[int]"
    is_sampled: bytearray
    logprobs: "array[float]"
    is_committed: bool

    @property
    def ids_crc32(self) -> int:
        return zlib.crc32(self.ids.tobytes())


class TokenChecks:
    """P5 and P10 over one run. Call `check` once."""

    def __init__(self, reader: SegmentReader) -> None:
        self._reader = reader
        self.unbroken = Findings(
            promise="P5",
            words="no turn lost or repeated a token, and no move reached a harness as an error",
            unit="turns",
        )
        self.exact = Findings(
            promise="P10", words="training ids and logprobs are the engine's", unit="paths"
        )

    def check(
        self, state: RunState, trained: Iterable[seen.MicroStepDone]
    ) -> tuple[CheckResult, CheckResult]:
        """`trained`: the micro-steps of accepted steps."""
        turns = _by_execution(state.turns.values())
        paths: dict[str, list[seen.PathDigest]] = {}
        for micro_step in trained:
            for path in micro_step.paths:
                if path.num_tokens:
                    paths.setdefault(path.execution, []).append(path)
        for execution in sorted({*turns, *paths}):
            restored = self._restore(turns.get(execution, ()))
            for path in paths.get(execution, ()):
                self._check_path(path, restored)
        self._check_continued(state)
        for error in state.harness_errors:
            if error.during_move:
                self.unbroken.broken(f"{error.execution} got an error from a move: {error.kind}")
        return self.unbroken.result(), self.exact.result()

    def _restore(self, turns: Sequence[TurnRecord]) -> ByTurn:
        restored: ByTurn = {}
        for turn in turns:
            problem = self._restore_turn(turn, restored)
            words = f"{turn.turn} attempt {turn.attempt}: {problem}"
            self.unbroken.expect(problem is None, words)
        return restored

    def _restore_turn(self, turn: TurnRecord, restored: ByTurn) -> str | None:
        """Read, check and restore one turn; returns what is wrong with it."""
        try:
            record = self._reader.read(turn.ref)
        except BoundaryError as error:
            return str(error)
        if msgspec.structs.replace(record.header, ref=turn.ref) != turn:
            return "the segment's header differs from the journal's"
        parent = _parent(turn, restored)
        if turn.parent and parent is None:
            return f"its parent {turn.parent} is not restored"
        restored[turn.turn, turn.attempt] = _join(turn, record, parent)
        size = 0 if parent is None else len(parent.ids)
        if turn.num_kept_tokens > size:
            return f"keeps {turn.num_kept_tokens} tokens of a parent of {size}"
        if turn.parent and not turn.fork_reason and turn.num_kept_tokens != size:
            return f"keeps {turn.num_kept_tokens} of its parent's {size} tokens without a reason"
        return _span_problem(turn.spans, turn.num_completion_tokens)

    def _check_continued(self, state: RunState) -> None:
        told: dict[tuple[str, int], list[seen.Continued]] = {}
        for _, one in state.continued:
            told.setdefault((one.turn, one.attempt), []).append(one)
        cut = {key for key, record in state.turns.items() if record.num_continuations}
        for key in sorted({*told, *cut}):
            if key in state.retold:
                continue
            problem = _continuation_problem(told.get(key, []), state.turns.get(key))
            if problem is not None:
                self.unbroken.broken(f"{key[0]}: {problem}")

    def _check_path(self, path: seen.PathDigest, restored: ByTurn) -> None:
        matches = [
            one
            for one in restored.values()
            if len(one.ids) == path.num_tokens and one.ids_crc32 == path.ids_crc32
        ]
        name = f"{path.execution}, a path of {path.num_tokens} tokens"
        if not any(one.is_committed for one in matches):
            self.exact.expect(False, f"{name}: no committed turn has these ids")
            return
        problems = [_path_problem(path, one) for one in matches if one.is_committed]
        self.exact.expect(None in problems, f"{name}: {problems[0]}")


def _by_execution(turns: Iterable[TurnRecord]) -> dict[str, list[TurnRecord]]:
    """In journal order, which has parents before children."""
    found: dict[str, list[TurnRecord]] = {}
    for turn in turns:
        found.setdefault(turn.execution, []).append(turn)
    return found


def _parent(turn: TurnRecord, restored: Mapping[tuple[str, int], Restored]) -> Restored | None:
    """The standing attempt of the parent turn: the last committed one, else the last."""
    attempts = [one for (name, _), one in restored.items() if name == turn.parent]
    committed = [one for one in attempts if one.is_committed]
    standing = committed or attempts
    return standing[-1] if standing else None


def _join(turn: TurnRecord, record: TokenRecord, parent: Restored | None) -> Restored:
    ids, is_sampled, logprobs = array("i"), bytearray(), array("f")
    if parent is not None:
        kept = turn.num_kept_tokens
        ids, is_sampled = parent.ids[:kept], parent.is_sampled[:kept]
        logprobs = parent.logprobs[:kept]
    ids.extend(record.new_prompt_ids)
    is_sampled.extend(bytes(len(record.new_prompt_ids)))
    logprobs.extend([0.0] * len(record.new_prompt_ids))
    ids.extend(record.completion_ids)
    is_sampled.extend(b"\x01" * len(record.completion_ids))
    logprobs.extend(record.logprobs)
    return Restored(
        ids=ids, is_sampled=is_sampled, logprobs=logprobs, is_committed=turn.is_committed
    )


def _span_problem(spans: Sequence[Span], num_tokens: int) -> str | None:
    """Versions grow along a turn; only a recalled core serves a newer one than its fellows."""
    end, version, engine = 0, -1, ""
    for span in spans:
        if span.start != end or span.end <= span.start:
            return f"a span [{span.start}, {span.end}) does not go on at {end}"
        is_after_core = engine == CORE_ENGINE != span.engine
        if span.policy_version < version and not is_after_core:
            return f"version {span.policy_version} samples after version {version}"
        end, version, engine = span.end, span.policy_version, span.engine
    return None if end == num_tokens else f"spans cover {end} of {num_tokens} tokens"


def _continuation_problem(told: Sequence[seen.Continued], record: TurnRecord | None) -> str | None:
    """Of one attempt of a turn."""
    if record is None:
        return "was continued elsewhere and never recorded"
    if len(told) != record.num_continuations:
        return f"{len(told)} continuations told, {record.num_continuations} recorded"
    by_place: dict[int, list[seen.Continued]] = {}
    for one in told:
        by_place.setdefault(one.num_tokens_so_far, []).append(one)
    for place, cuts in by_place.items():
        problem = _cut_problem(record, place, cuts)
        if problem is not None:
            return problem
    return "ended as an error after it was continued" if record.finish == "error" else None


def _cut_problem(record: TurnRecord, place: int, cuts: Sequence[seen.Continued]) -> str | None:
    """What was sampled before the cut came from where it was cut, the rest from where it went."""
    if place > record.num_completion_tokens:
        return f"had {place} tokens when it was cut, {record.num_completion_tokens} are recorded"
    before = [span.engine for span in record.spans if span.start < place <= span.end]
    after = [span.engine for span in record.spans if span.start <= place < span.end]
    if before and before[0] != cuts[0].from_engine:
        return f"cut after {place} tokens at {cuts[0].from_engine}, sampled at {before[0]}"
    if after and after[0] != cuts[-1].to_engine:
        return f"continued after {place} tokens at {cuts[-1].to_engine}, sampled at {after[0]}"
    return None


def _path_problem(path: seen.PathDigest, restored: Restored) -> str | None:
    trained = array("f")
    for start, end in path.trained:
        if not 0 <= start < end <= len(restored.ids):
            return f"trains [{start}, {end}), outside of the path"
        if not all(restored.is_sampled[start:end]):
            return f"trains [{start}, {end}), where the policy did not sample all tokens"
        trained.extend(restored.logprobs[start:end])
    if zlib.crc32(trained.tobytes()) != path.logprobs_crc32:
        return "its sampling logprobs are not the engine's"
    return None
