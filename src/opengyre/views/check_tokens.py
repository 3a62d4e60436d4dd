"""P5 and P10 from the token segments: unbroken turns, and training ids that are engine ids.

Must not know: engines, renderers, the trainer. Invariant: everything is restored from segment
bytes; the journal only says where they are and what was trained.
"""

import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from opengyre.control.ids import cell_engine_id
from opengyre.seams.errors import BoundaryError
from opengyre.seams.records import Span, TurnRecord
from opengyre.store import observations as seen
from opengyre.store.segments import SegmentReader
from opengyre.views.findings import CheckResult, Findings
from opengyre.views.restored import Line, Lines
from opengyre.views.run_state import RunState

CORE_ENGINE = cell_engine_id(0)
Paths = Sequence[seen.PathDigest]
"""What accepted steps told of one execution's paths."""
SeeExecution = Callable[[str, Lines, Paths], None]


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
        self,
        state: RunState,
        trained: Iterable[seen.MicroStepDone],
        *,
        also: SeeExecution | None = None,
    ) -> tuple[CheckResult, CheckResult]:
        """`trained`: the micro-steps of accepted steps; `also` sees each execution's lines and
        trained paths, one execution after the other."""
        turns = _by_execution(state.turns.values())
        paths = _paths_by_execution(trained)
        for execution in sorted({*turns, *paths}):
            one = state.executions.get(execution)
            lines = Lines(0 if one is None else one.num_given_up_turns)
            for turn in turns.get(execution, ()):
                problem = self._restore(turn, lines)
                words = f"{turn.turn} attempt {turn.attempt}: {problem}"
                self.unbroken.expect(problem is None, words)
            own = paths.get(execution, [])
            for path in own:
                self._check_path(path, lines)
            if also is not None:
                also(execution, lines, own)
        self._check_continued(state)
        for error in state.harness_errors:
            if error.during_move:
                self.unbroken.broken(f"{error.execution} got an error from a move: {error.kind}")
        return self.unbroken.result(), self.exact.result()

    def _restore(self, turn: TurnRecord, lines: Lines) -> str | None:
        """Read, check and restore one turn; returns what is wrong with it."""
        try:
            record = self._reader.read(turn.ref)
        except BoundaryError as error:
            return str(error)
        if msgspec.structs.replace(record.header, ref=turn.ref) != turn:
            return "the segment's header differs from the journal's"
        parent = lines.parent_of(turn)
        if turn.parent and parent is None:
            return f"its parent {turn.parent} is not restored"
        lines.add(record)
        size = 0 if parent is None else parent.num_tokens
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

    def _check_path(self, path: seen.PathDigest, lines: Lines) -> None:
        named = lines.standing(path.turn)
        among = lines.all if not path.turn else [] if named is None else [named]
        matches = [
            one
            for one in among
            if one.turn.is_committed
            and one.num_tokens == path.num_tokens
            and one.ids_crc32 == path.ids_crc32
        ]
        name = f"{path.execution}, a path of {path.num_tokens} tokens to {path.turn or 'a leaf'}"
        if not matches:
            self.exact.expect(False, f"{name}: no committed turn has these ids")
            return
        problems = [_path_problem(path, one) for one in matches]
        self.exact.expect(None in problems, f"{name}: {problems[0]}")


def _by_execution(turns: Iterable[TurnRecord]) -> dict[str, list[TurnRecord]]:
    """In journal order, which has parents before children."""
    found: dict[str, list[TurnRecord]] = {}
    for turn in turns:
        found.setdefault(turn.execution, []).append(turn)
    return found


def _paths_by_execution(
    trained: Iterable[seen.MicroStepDone],
) -> Mapping[str, list[seen.PathDigest]]:
    """Those that were computed; others were counted only."""
    paths: dict[str, list[seen.PathDigest]] = {}
    for micro_step in trained:
        for path in micro_step.paths:
            if path.num_tokens:
                paths.setdefault(path.execution, []).append(path)
    return paths


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


def _path_problem(path: seen.PathDigest, line: Line) -> str | None:
    for start, end in path.trained:
        if not 0 <= start < end <= line.num_tokens:
            return f"trains [{start}, {end}), outside of the path"
    trained = array("f")
    for one, (low, high) in line.parts(path.trained):
        if low < one.sampled_begin:
            return f"trains [{low}, {high}), where the policy did not sample all tokens"
        trained.extend(one.logprobs[low - one.sampled_begin : high - one.sampled_begin])
    if zlib.crc32(trained.tobytes()) != path.logprobs_crc32:
        return "its sampling logprobs are not the engine's"
    return None
