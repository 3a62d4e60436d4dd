"""Trained positions of a path as ranges of the ids that each of its turns sampled."""

import zlib
from array import array

from opengyre.gateway.request import Message, Role
from opengyre.gateway.turns import Node, full_ids
from opengyre.runtime.exporting.trained import trained_ranges
from opengyre.store.observations import PathDigest


def node(name: str, parent: Node | None, num_kept: int, new: list[int], sampled: list[int]) -> Node:
    return Node(
        turn=name,
        key=b"",
        protocol="openai-chat",
        parent=parent,
        num_kept=num_kept,
        new_ids=array("i", new),
        completion=array("i", sampled),
        message=Message(role=Role.ASSISTANT),
        delta=b"",
    )


def path_of(leaf: Node, *trained: tuple[int, int]) -> PathDigest:
    ids = array("i", full_ids(leaf))
    return PathDigest(
        execution="e000001",
        group="g00001",
        turn=leaf.turn,
        num_tokens=len(ids),
        ids_crc32=zlib.crc32(ids.tobytes()),
        trained=list(trained),
        logprobs_crc32=0,
    )


ROOT = node("t1", None, 0, [1, 2, 3], [4, 5, 6, 7])
NEXT = node("t2", ROOT, 7, [8, 9], [10, 11, 12])
FORK = node("t3", ROOT, 5, [20], [21, 22])
NODES = {(one.turn, None): one for one in (ROOT, NEXT, FORK)}


def test_a_path_gives_each_of_its_turns_its_own_ranges() -> None:
    ranges = trained_ranges([path_of(NEXT, (4, 7), (9, 12))], NODES)
    assert ranges == {"t1": [(1, 4)], "t2": [(0, 3)]}


def test_a_fork_trains_its_own_ids_and_what_it_kept_is_another_paths() -> None:
    ranges = trained_ranges([path_of(FORK, (6, 8)), path_of(NEXT, (3, 7), (9, 10))], NODES)
    assert ranges == {"t1": [(0, 4)], "t2": [(0, 1)], "t3": [(0, 2)]}


def test_a_fork_that_is_trained_with_what_it_kept_reaches_no_further() -> None:
    assert trained_ranges([path_of(FORK, (3, 8))], NODES) == {"t1": [(0, 2)], "t3": [(0, 2)]}


def test_a_path_that_is_no_recorded_turns_gives_nothing() -> None:
    assert trained_ranges([path_of(node("t9", ROOT, 7, [8], [10]), (8, 9))], NODES) == {}
