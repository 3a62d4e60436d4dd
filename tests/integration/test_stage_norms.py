"""Clipping acts on the norm over all stages, and alike on each of them.

AdamW's first update hides a factor of the gradient; its moments show it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from opengyre.trajectory.bundles import Layout
from tests.plain_training import worst_relative
from tests.stage_stories import Fleet, Kind, groups_of, old_objects_aside, reference, step_alone

NEVER, ALWAYS = 1e9, 1e-3


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    with old_objects_aside():
        yield


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("max_grad_norm", [NEVER, ALWAYS], ids=["never", "always"])
def test_the_norm_is_the_whole_models_and_scales_all_stages_alike(
    tmp_path: Path, max_grad_norm: float, is_tied: bool, num_stages: int
) -> None:
    kind = Kind(is_tied=is_tied, max_grad_norm=max_grad_norm)
    with contextlib.closing(Fleet(kind, num_stages, tmp_path)) as fleet:
        core = fleet.restored_core()
        core.enter_training()
        groups = groups_of(kind.family, Layout.TREE, is_tied=is_tied)
        for step, want in enumerate(reference(kind)):
            norms = step_alone(core, groups, step)
            assert norms.grad_norm == pytest.approx(want.grad_norm, rel=1e-9)
            assert ALWAYS < norms.grad_norm < NEVER
            assert worst_relative(fleet.moments(), want.moments) < 1e-9
