"""Commands on their way: ids, this plan's list, and those not answered yet.

Owns: command ids and the pending table. Must not know: what an answer means.
Invariant: a command is answered at most once; answers to revoked ones are stale.
"""

from opengyre.control.commands import AnyCommand
from opengyre.control.ids import CommandId


class Outbox:
    def __init__(self) -> None:
        self.num_issued = 0
        self._pending: dict[CommandId, AnyCommand] = {}
        self._plan: list[AnyCommand] = []

    def new_id(self) -> CommandId:
        self.num_issued += 1
        return CommandId(self.num_issued)

    def add(self, command: AnyCommand) -> CommandId:
        self._plan.append(command)
        self._pending[command.command_id] = command
        return command.command_id

    def answer(self, command_id: CommandId) -> AnyCommand | None:
        """The command this answers, or None if it was answered or revoked before."""
        return self._pending.pop(command_id, None)

    def revoke(self, command_id: CommandId) -> None:
        """Its answer no longer matters."""
        self._pending.pop(command_id, None)

    def pending(self) -> tuple[AnyCommand, ...]:
        return tuple(self._pending.values())

    def is_pending(self, command_id: CommandId | None) -> bool:
        return command_id in self._pending

    def take_plan(self) -> tuple[AnyCommand, ...]:
        plan, self._plan = tuple(self._plan), []
        return plan
