"""Engines leave, die, load a version or are away in the middle of a program's turns.

Each run strikes its turns at every point: before the first token, in thinking, in text, inside
tool arguments, right before the end. The harness must not be able to tell.
"""

import asyncio
import itertools
from enum import StrEnum

import pytest
from drawn_pairs import PROGRAMS, pairs
from program_rig import LINES, Live, Outcome, Scene, profile_of
from struck_engine import Point, Strike, StruckEngine

from opengyre.runtime.trying.execution import EXECUTION
from opengyre.seams.engine import Finish

pytestmark = pytest.mark.timeout(200)

AWAY_S = 1.5
DEAD_S = 0.3


def leaves(live: Live) -> Strike:
    """The cell leaves rollout: frozen here, continued elsewhere."""

    def strike(engine: StruckEngine) -> Finish:
        live.gateway.set_routes({EXECUTION: live.other(engine)})
        return Finish.FROZEN

    return strike


def dies(live: Live) -> Strike:
    """No terminal chunk ever comes; the death is told, the route changes a little later."""
    incarnations = itertools.count(1)

    async def revive(engine: StruckEngine) -> None:
        await asyncio.sleep(DEAD_S)
        live.gateway.set_routes({EXECUTION: live.other(engine)})
        live.gateway.connect_engine(engine.name, engine, next(incarnations))

    def strike(engine: StruckEngine) -> None:
        live.tasks.create_task(revive(engine))
        live.gateway.engine_lost(engine.name)

    return strike


def publishes(live: Live) -> Strike:
    """A version becomes due: frozen, loaded, continued on the same engine."""
    versions = itertools.count(1)

    async def load(engine: StruckEngine, version: int) -> None:
        await engine.freeze_all()
        await engine.pause()
        await engine.begin_update(version)
        await engine.commit(version)
        await engine.resume()
        live.gateway.open_door(engine.name)

    def strike(engine: StruckEngine) -> Finish:
        live.gateway.close_door(engine.name)
        live.tasks.create_task(load(engine, next(versions)))
        return Finish.FROZEN

    return strike


def is_away(live: Live, away_s: float = AWAY_S) -> Strike:
    """No engine at all for a while."""

    async def come_back(engine: StruckEngine) -> None:
        await asyncio.sleep(away_s)
        live.gateway.open_door(engine.name)

    def strike(engine: StruckEngine) -> Finish:
        live.gateway.close_door(engine.name)
        live.tasks.create_task(come_back(engine))
        return Finish.FROZEN

    return strike


def check_unnoticed(run: Outcome) -> None:
    """As if nothing had happened: the right file, one request a turn, exact records."""
    run.check_ended_well()
    assert run.struck == list(Point)
    assert run.files["out"].split() == list(LINES)
    assert {call.status for call in run.calls} == {200}
    assert len(run.calls) == len(run.turns) == len(run.committed)
    run.check_recorded_exactly()
    run.check_one_unbroken_branch()
    assert run.account.trained > 0


class Move(StrEnum):
    """What happens to the engine."""

    LEAVES = "leaves"
    DIES = "dies"
    PUBLISHES = "publishes"
    IS_AWAY = "is away"


STRIKES = {
    Move.LEAVES: leaves,
    Move.DIES: dies,
    Move.PUBLISHES: publishes,
    Move.IS_AWAY: is_away,
}


@pytest.mark.parametrize(("move", "name"), pairs(tuple(Move), num_each=2))
def test_case_9_10_18_what_happens_to_engines_goes_unnoticed(move: Move, name: str) -> None:
    run = Scene(profile_of(name), points=tuple(Point), strike=STRIKES[move]).run()
    check_unnoticed(run)
    struck = run.turns[: len(Point)]
    versions = [[span.policy_version for span in turn.spans] for turn in struck]
    match move:
        case Move.LEAVES | Move.DIES:
            assert sum(turn.num_continuations for turn in struck) == len(Point)
        case Move.PUBLISHES:
            assert versions == [[1], *([number, number + 1] for number in range(1, len(Point)))]
        case Move.IS_AWAY:
            assert all(turn.held_s >= AWAY_S * 0.9 for turn in struck)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_case_10_a_minute_without_an_engine_is_waited_out(name: str) -> None:
    def strike(live: Live) -> Strike:
        return is_away(live, 60.0)

    run = Scene(
        profile_of(name), points=(Point.TEXT,), strike=strike, wall_s=180.0, hold_comment_s=8.0
    ).run()
    run.check_ended_well()
    assert run.files["out"].split() == list(LINES)
    assert len(run.calls) == len(run.committed)
