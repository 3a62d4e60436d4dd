"""Cells of several pipeline stages whose other stages are threads of this process.

Real orders over real channels, real gloo between the stages; only the processes are left out.
"""

import contextlib
import copy
import socket
import threading
from collections.abc import Callable, Iterator

from torch import nn

from opengyre.runtime.embedded import TIED, StageParts
from opengyre.runtime.stage_process import serve
from opengyre.runtime.stages import STAGE_TYPES
from opengyre.seams.weights import WeightPlane
from opengyre.trainer.cut import cut_of
from opengyre.trainer.desk import Place, StageDesk
from opengyre.trainer.embedded import EmbeddedCell, whole_cell
from opengyre.trainer.followers import RemoteStage
from opengyre.trainer.pipeline.follower import Follower
from opengyre.trainer.pipeline.link import Link, open_link
from opengyre.trainer.prefix_groups import GroupStore
from opengyre.trainer.stage import Stage, StageSettings
from opengyre.transport.blocking import Channel

MakePlane = Callable[[str], WeightPlane]
Watch = Callable[[int, Stage], None]
END_S = 20.0


def _unwatched(number: int, stage: Stage) -> None:
    """Nobody looks."""


@contextlib.contextmanager
def staged_cell(
    module: nn.Module,
    *,
    num_stages: int,
    settings: StageSettings,
    make_plane: MakePlane,
    is_core: bool = True,
    watch: Watch = _unwatched,
) -> Iterator[EmbeddedCell]:
    """A cell on copies of `module`, whose layers are cut into `num_stages`; the first stage has
    `module` itself. `make_plane(name)` gives fresh planes, which the caller closes. `watch(number,
    stage)` sees each of several stages before it is used."""
    if num_stages == 1:
        planes = {"weights": make_plane("w0"), "gradients": make_plane("g0")}
        yield whole_cell(module, **planes, settings=settings)
        return
    store = GroupStore()
    stages = _Stages(store.address, num_stages, settings, make_plane, is_core=is_core)
    stages.watch = watch
    try:
        cell = stages.start(module)
        yield cell
        cell.leave_training()
    finally:
        stages.end()
        store.close()


class _Stages:
    def __init__(
        self,
        store: str,
        num_stages: int,
        settings: StageSettings,
        make_plane: MakePlane,
        *,
        is_core: bool,
    ) -> None:
        self._store = store
        self._num_stages = num_stages
        self._settings = settings
        self._make_plane = make_plane
        self._is_core = is_core
        self.watch: Watch = _unwatched
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []

    def start(self, module: nn.Module) -> EmbeddedCell:
        modules = [module, *(copy.deepcopy(module) for _ in range(1, self._num_stages))]
        for stage in range(1, self._num_stages):
            ours, theirs = socket.socketpair()
            self._channels.append(Channel(ours, STAGE_TYPES))
            thread = threading.Thread(
                target=self._follow,
                args=(modules[stage], stage, Channel(theirs, STAGE_TYPES)),
                name=f"stage {stage}",
            )
            self._threads.append(thread)
            thread.start()
        desk = self._desk(module, 0)
        link = self._link(0)
        return EmbeddedCell(
            desk,
            settings=self._settings,
            followers=[RemoteStage(channel) for channel in self._channels],
            link=link,
            is_core=self._is_core,
        )

    def end(self) -> None:
        for channel in self._channels:
            channel.close()
        for thread in self._threads:
            thread.join(END_S)
            assert not thread.is_alive(), f"{thread.name} did not end"

    def _follow(self, module: nn.Module, stage: int, channel: Channel) -> None:
        with contextlib.closing(channel):
            desk = self._desk(module, stage)
            desk.stage.leave(keeps_weights=self._is_core)
            follower = Follower(
                desk.stage, link=self._link(stage), stage=stage, num_stages=self._num_stages
            )
            serve(channel, StageParts(desk=desk, follower=follower))

    def _desk(self, module: nn.Module, stage: int) -> StageDesk:
        model = cut_of(
            module,
            stage=stage,
            num_stages=self._num_stages,
            temperature=self._settings.temperature,
        )
        tied = TIED if module.config.tie_word_embeddings else ""
        desk = StageDesk(
            model,
            settings=self._settings,
            place=Place(stage=stage, num_stages=self._num_stages, tied=tied),
            weights=self._make_plane(f"w{stage}"),
            gradients=self._make_plane(f"g{stage}"),
        )
        self.watch(stage, desk.stage)
        return desk

    def _link(self, stage: int) -> Link:
        return open_link(self._store, name="threads", stage=stage, num_stages=self._num_stages)
