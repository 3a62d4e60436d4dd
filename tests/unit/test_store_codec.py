"""Every kind of journal row comes back equal, and nothing else gets in."""

import math
import types
import typing
from enum import Enum
from typing import Any, NewType, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.control.commands import AnyCommand, Plan
from opengyre.control.facts import Fact, VerdictGiven
from opengyre.control.ids import ExecutionId
from opengyre.seams.errors import BoundaryError
from opengyre.store.codec import decode, encode, kind_of
from opengyre.store.observations import AnyObservation, EvalResult

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    Any: st.integers(0, 9),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of the annotation `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if isinstance(kind, NewType):
        return values_of(kind.__supertype__)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(one) for one in args])
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values_of(args[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, args))
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(max_size=4), values_of(args[1]), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    hints = typing.get_type_hints(kind)
    hints = {name: hint for name, hint in hints.items() if not name.startswith("__")}
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})


@pytest.mark.parametrize("kind", [*get_args(Fact), *get_args(AnyObservation), Plan])
def test_every_row_type_comes_back_equal_and_of_the_same_type(kind: Any) -> None:
    @settings(max_examples=12, deadline=None)
    @given(values_of(kind))
    def round_trip(value: Any) -> None:
        back = decode(encode(value))
        assert type(back) is kind
        assert back == value
        assert encode(back) == encode(value)

    round_trip()


@pytest.mark.parametrize("kind", get_args(AnyCommand))
def test_every_command_comes_back_equal_inside_a_plan(kind: Any) -> None:
    @settings(max_examples=12, deadline=None)
    @given(values_of(kind))
    def round_trip(command: Any) -> None:
        back = decode(encode(Plan(commands=(command,), waiting_for=("a", "b"))))
        assert isinstance(back, Plan)
        assert type(back.commands[0]) is kind
        assert back.commands == (command,)
        assert back.waiting_for == ("a", "b")

    round_trip()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_and_never_becomes_no_verdict(bad: float) -> None:
    verdict = VerdictGiven(
        execution=ExecutionId("e000001"), reward=bad, reason="", num_trainable_tokens=1
    )
    with pytest.raises(BoundaryError, match="VerdictGiven holds a non-finite number"):
        encode(verdict)
    with pytest.raises(BoundaryError, match="EvalResult"):
        encode(EvalResult(burst=0, version=0, rewards=[0.5, bad]))


def test_an_unknown_or_torn_row_is_refused_with_its_first_characters() -> None:
    for body in (b'["Nonsense",{}]', b'["EngineLost",{"engine"', b"", b'["EngineLost",{}]'):
        with pytest.raises(BoundaryError, match="cannot read the row"):
            decode(body)
    with pytest.raises(BoundaryError, match="int is not a journal row"):
        encode(typing.cast(Any, 3))


def test_kinds_tell_facts_plans_observations_and_meta_apart() -> None:
    assert kind_of(Plan()) == "plan"
    assert kind_of(EvalResult(burst=0, version=0, rewards=[])) == "observation"
