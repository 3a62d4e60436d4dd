"""What goes wrong between a program and the gateway, on the first call (HARNESSES.md section 2).

The gateway's record decides what is trained, whatever the program's exit code says: a call whose
answer was not written to its end is not trained, and a retried call is trained once.
"""

from dataclasses import replace
from enum import StrEnum

import pytest
from drawn_pairs import PROGRAMS, pairs
from program_rig import APPENDING, LINES, SOLVER, Outcome, Scene, profile_of
from wire_proxy import Fault, WireProxy

from opengyre.seams.harness import Ending

TOKENS_PER_S = 300.0
SLOW_FIRST = replace(SOLVER, commands=(f"{APPENDING[0]}  # {'-' * 300}", *APPENDING[1:]))
"""The first answer takes more than a second: it can be cut anywhere before its end."""
NUM_TURNS = len(LINES) + 1
FOR_EVER_S = 60.0

pytestmark = pytest.mark.timeout(400)


class Fate(StrEnum):
    """What becomes of the program, as it was measured without us."""

    SOLVES = "solves"
    FAILS = "exits with an error"
    GIVES_UP = "exits with 0, nothing done"
    LOOPS = "tries until its time is over"


CLAUDE, CODEX, QWEN, MINI = "claude-code", "codex", "qwen-code", "mini-swe-agent"
FATES = {
    (Fault.UNAVAILABLE_FOR_EVER, CLAUDE): Fate.FAILS,
    (Fault.UNAVAILABLE_FOR_EVER, CODEX): Fate.FAILS,
    (Fault.UNAVAILABLE_FOR_EVER, QWEN): Fate.LOOPS,
    (Fault.UNAVAILABLE_FOR_EVER, MINI): Fate.FAILS,
    (Fault.DROP_EARLY, QWEN): Fate.GIVES_UP,
    (Fault.DROP_LATE, CLAUDE): Fate.FAILS,
    (Fault.DROP_LATE, QWEN): Fate.GIVES_UP,
    (Fault.CLEAN_END, CLAUDE): Fate.GIVES_UP,
    (Fault.ERROR_EVENT, CODEX): Fate.FAILS,
    (Fault.BAD_REQUEST, CLAUDE): Fate.FAILS,
    (Fault.BAD_REQUEST, CODEX): Fate.FAILS,
    (Fault.BAD_REQUEST, QWEN): Fate.GIVES_UP,
}
COSTLY = frozenset(
    {
        (Fault.UNAVAILABLE_FOR_EVER, CLAUDE),
        (Fault.UNAVAILABLE_FOR_EVER, QWEN),
        (Fault.UNAVAILABLE_FOR_EVER, MINI),
        (Fault.ERROR_EVENT, QWEN),
        (Fault.BAD_REQUEST, MINI),
    }
)


def run_with(fault: Fault, name: str, *, silence_s: float = 3.0) -> Outcome:
    num_strikes = None if fault is Fault.UNAVAILABLE_FOR_EVER else 1

    def proxy(upstream: str) -> WireProxy:
        return WireProxy(upstream, fault=fault, num_strikes=num_strikes, silence_s=silence_s)

    wall_s = 320.0 if (fault, name) in COSTLY else 90.0
    if FATES.get((fault, name)) is Fate.LOOPS:
        wall_s = FOR_EVER_S
    scene = Scene(
        profile_of(name),
        solver=SLOW_FIRST,
        proxy=proxy,
        tokens_per_s=TOKENS_PER_S,
        wall_s=wall_s,
    )
    return scene.run()


@pytest.mark.parametrize(("fault", "name"), pairs(tuple(Fault), num_each=1, costly=COSTLY))
def test_case_8_a_fault_on_the_wire_leaves_each_turn_trained_at_most_once(
    fault: Fault, name: str
) -> None:
    run = run_with(fault, name)
    fate = FATES.get((fault, name), Fate.SOLVES)
    result = run.played.result
    struck = [call for call in run.calls if call.fault is not None]
    assert struck, "the fault never came"
    run.check_recorded_exactly()
    if fate is Fate.SOLVES:
        run.check_ended_well()
        assert run.files["out"].split() == list(LINES)
        assert len(run.committed) == NUM_TURNS
        assert run.account.trained > 0
        return
    assert "out" not in run.files
    assert run.committed == []
    ending = {Fate.FAILS: (Ending.EXITED, 1), Fate.GIVES_UP: (Ending.EXITED, 0)}
    expected = ending.get(fate, (Ending.TIMED_OUT, None))
    assert (result.ending, result.exit_code) == expected, result.output_tail[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("fault", [Fault.SILENCE_BEFORE_HEADERS, Fault.SILENCE_AFTER_HEADERS])
def test_twenty_seconds_of_silence_are_waited_out(fault: Fault, name: str) -> None:
    run = run_with(fault, name, silence_s=20.0)
    run.check_ended_well()
    assert run.files["out"].split() == list(LINES)
    assert len(run.committed) == len(run.calls) == NUM_TURNS
