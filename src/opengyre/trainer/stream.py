"""The stream of micro-steps of one step: atomic leased claims over offered groups.

Owns: which bundles are in which cell's hands. Must not know processes, clocks (time is `now_s`) or
gradients. Invariants: a bundle is in one live micro-step at most; numbers are never reused; a group
is assigned when its first micro-step is claimed, however early its rows are prepared, one without
trainable rows when it is reached; only members claim; what a dropped member held or did is in the
stream again.

Order. Groups are reached as they are offered (rule 5). Near the end, when all that the step may
still take is known and prepared, what is left of all groups is claimed largest first, in
micro-steps of a K (P + 1)th of what is left, so that the K cells finish together. For cells that
claim when they are free: as long as micro-steps hold one bundle each this is Graham's LPT, at most
4/3 - 1/3K times the shortest time; and whatever they hold, a micro-step that was claimed near the
end is done no later than (mean load) + (1 - 1/K) max(largest bundle left, finest budget). A cell
that holds several of them may be later by what it holds, so one that holds more than the mean of
all that is to be done gets nothing more.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import islice

from opengyre.control.errors import InvariantError
from opengyre.seams.cells import MicroStep, StepCounts
from opengyre.trainer.wire import add_counts, execution_share, micro_step
from opengyre.trajectory.bundles import Bundle
from opengyre.trajectory.packing import Filling, sort_for_packing

FINEST = 8
"""Near the end a micro-step's budget may fall to this part of the full one."""

BundlesOf = Callable[[str], Sequence[Bundle] | None]
LookAhead = Callable[[Sequence[str], Container[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """`max_groups` is B. A cell that finishes none of its claims for `lease_s` is overdue.

    Near the end are the last `lookahead_groups`; what is left then is cut into `parts_per_cell` for
    each cell (P + 1: what a pipeline of P stages holds, with one micro-step ahead).
    """

    budget_tokens: int
    lease_s: float
    max_groups: int
    lookahead_groups: int = 2
    parts_per_cell: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`micro_step` None: nothing to do now. `assigned`: groups this claim newly assigned."""

    micro_step: MicroStep | None = None
    assigned: tuple[str, ...] = ()
    is_refused: bool = False


@dataclass(slots=True, kw_only=True)
class CellCounters:
    """What one cell did in this step. `num_refused`: claims and dones after it was dropped."""

    num_claimed: int = 0
    num_done: int = 0
    num_tokens_done: int = 0
    num_returned: int = 0
    num_refused: int = 0


@dataclass(slots=True, kw_only=True)
class _Issued:
    cell: int
    micro_step: MicroStep
    bundles: list[Bundle]
    deadline_s: float
    is_done: bool = False


@dataclass(slots=True)
class _State:
    """`held`: by cell, what of `issued` it has not done, in the order of its claims."""

    offered: deque[str] = field(default_factory=deque)
    assigned: dict[str, None] = field(default_factory=dict)
    pending: list[Bundle] = field(default_factory=list)
    issued: dict[int, _Issued] = field(default_factory=dict)
    held: dict[int, dict[int, _Issued]] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    next_number: int = 0
    is_closed: bool = False


def _is_always_prepared(offered: Sequence[str], assigned: Container[str]) -> None:
    """Whoever has all bundles at hand prepares nothing."""


class StepStream:
    """`bundles_of(group)` gives what a ready group trains, the same at each call, or None as long
    as that is not prepared: then a claim gets nothing of it, and is to be asked for again.

    `look_ahead(offered, assigned)` is told what comes next, in order, whenever that changes.
    """

    def __init__(
        self,
        step: int,
        *,
        version: int,
        bundles_of: BundlesOf,
        settings: StreamSettings,
        look_ahead: LookAhead = _is_always_prepared,
    ) -> None:
        self.step = step
        self.version = version
        self._bundles_of = bundles_of
        self._look_ahead = look_ahead
        self._settings = settings
        self._state = _State()
        self._counters: dict[int, CellCounters] = {}

    @property
    def assigned(self) -> tuple[str, ...]:
        """Groups of this step so far, in the order in which they were assigned."""
        return tuple(self._state.assigned)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(self._state.members))

    @property
    def is_closed(self) -> bool:
        return self._state.is_closed

    @property
    def is_drained(self) -> bool:
        """Closed, and every micro-step is done by a living member."""
        state = self._state
        return state.is_closed and not state.pending and not any(state.held.values())

    def counters(self, cell: int) -> CellCounters:
        return self._counters.setdefault(cell, CellCounters())

    def all_counters(self) -> list[tuple[int, CellCounters]]:
        """(cell, what it did), in cell order: of all that were ever members or asked to be."""
        return sorted(self._counters.items())

    def admit(self, cell: int) -> bool:
        """Make `cell` a member. False (refused) if it was dropped from this step."""
        if cell in self._state.dropped:
            self.counters(cell).num_refused += 1
            return False
        self._state.members.add(cell)
        self.counters(cell)
        return True

    def offer(self, groups: Sequence[str]) -> None:
        """Replace what may be packed next, in this order. Groups already assigned are skipped."""
        state = self._state
        fresh = [group for group in groups if group not in state.assigned]
        if state.is_closed and fresh:
            raise InvariantError(f"step {self.step} is closed but was offered {fresh[0]}")
        state.offered = deque(fresh)
        self._look_ahead(fresh, state.assigned)

    def claim(self, cell: int, now_s: float) -> Claim:
        """Make and lease the next micro-step, if there is anything to train."""
        state = self._state
        if cell not in state.members:
            self.counters(cell).num_refused += 1
            return Claim(is_refused=True)
        left = self._known_end()
        if left and self._has_its_share(cell, left):
            return Claim()
        filling = Filling(budget_tokens=self._budget_tokens(left))
        assigned = self._fill(filling) if left is None else self._fill_at_end(filling, left)
        if assigned:
            self._look_ahead(tuple(state.offered), state.assigned)
        if not filling.bundles:
            return Claim(assigned=assigned)
        made = micro_step(
            filling.bundles, step=self.step, number=state.next_number, version=self.version
        )
        issued = _Issued(
            cell=cell,
            micro_step=made,
            bundles=filling.bundles,
            deadline_s=now_s + self._settings.lease_s,
        )
        state.issued[made.number] = issued
        state.held.setdefault(cell, {})[made.number] = issued
        state.next_number += 1
        self.counters(cell).num_claimed += 1
        return Claim(micro_step=made, assigned=assigned)

    def done(self, cell: int, number: int, now_s: float = 0.0) -> bool:
        """The backward of a claimed micro-step is in the cell's sums. False: refused.

        The lease of what the cell holds next begins `now_s`: it waited for this one till then.
        """
        counters, held = self.counters(cell), self._state.held.get(cell, {})
        issued = held.pop(number, None)
        if issued is None:
            counters.num_refused += 1
            return False
        issued.is_done = True
        counters.num_done += 1
        counters.num_tokens_done += len(issued.micro_step.token_ids)
        following = next(iter(held.values()), None)
        if following is not None:
            following.deadline_s = max(following.deadline_s, now_s + self._settings.lease_s)
        return True

    def overdue(self, now_s: float) -> tuple[int, ...]:
        """Cells whose oldest unfinished claim is past its lease. Claims behind it wait in the
        cell's own pipeline, and say nothing about the cell."""
        held = self._state.held
        oldest = {cell: next(iter(held[cell].values())) for cell in sorted(held) if held[cell]}
        return tuple(cell for cell, issued in oldest.items() if issued.deadline_s < now_s)

    def drop_member(self, cell: int) -> tuple[str, ...]:
        """Take back all that `cell` claimed and did; it is refused from now on.

        Returns the groups that came back whole and are unassigned again, in order. In a closed
        step groups stay assigned and their bundles are claimable again at once.
        """
        state = self._state
        state.members.discard(cell)
        state.dropped.add(cell)
        state.held.pop(cell, None)
        numbers = [number for number, one in state.issued.items() if one.cell == cell]
        bundles = [one for number in numbers for one in state.issued.pop(number).bundles]
        self.counters(cell).num_returned += len(numbers)
        back = () if state.is_closed else self._whole_groups(bundles)
        for group in back:
            del state.assigned[group]
        state.pending = [one for one in (*bundles, *state.pending) if one.group not in back]
        sort_for_packing(state.pending)
        return back

    def close(self, num_groups: int) -> None:
        """No more groups: the step has exactly the `num_groups` that are assigned."""
        state = self._state
        if num_groups != len(state.assigned):
            raise InvariantError(
                f"step {self.step} closes with {num_groups} groups, {len(state.assigned)} assigned"
            )
        state.is_closed = True
        state.offered.clear()

    def done_counts(self) -> StepCounts:
        """What the members' sums must add up to: executions, tokens, micro-step numbers."""
        total = StepCounts()
        for number in sorted(self._state.issued):
            issued = self._state.issued[number]
            if issued.is_done:
                total = add_counts(total, _counts_of(issued.micro_step))
        return total

    def _known_end(self) -> list[Bundle] | None:
        """All bundles that are still to be claimed, largest first; None before the end is known.

        Groups are known to be the last when they fill the step's places; if they are more than are
        looked ahead, the supply of the cells to come (rule 7) is not to be spent on order.
        """
        state, settings = self._state, self._settings
        num_places = settings.max_groups - len(state.assigned)
        last = list(islice(state.offered, num_places))
        is_known = state.is_closed or len(last) == num_places
        if not is_known or len(last) > settings.lookahead_groups:
            return None
        left = list(state.pending)
        for group in last:
            bundles = self._bundles_of(group)
            if bundles is None:
                return None
            left.extend(bundles)
        sort_for_packing(left)
        return left

    def _has_its_share(self, cell: int, left: Sequence[Bundle]) -> bool:
        """Does `cell` hold more than the mean of all that is to be done: then others are free
        before it, and what it took more would wait in its pipeline."""
        held = {
            one: sum(len(issued.micro_step.token_ids) for issued in self._state.held[one].values())
            for one in self._state.held
        }
        num_tokens = sum(bundle.cost_tokens for bundle in left) + sum(held.values())
        return held.get(cell, 0) * len(self._state.members) > num_tokens

    def _budget_tokens(self, left: Sequence[Bundle] | None) -> int:
        """The full budget; near the end each place of each cell's pipeline gets its part."""
        settings = self._settings
        if left is None:
            return settings.budget_tokens
        num_tokens = sum(bundle.cost_tokens for bundle in left)
        part = num_tokens // (len(self._state.members) * settings.parts_per_cell)
        return min(settings.budget_tokens, max(settings.budget_tokens // FINEST, part, 1))

    def _fill_at_end(self, filling: Filling, left: list[Bundle]) -> tuple[str, ...]:
        """The largest of all that is `left` first. Groups without a bundle are reached as well."""
        state = self._state
        untouched = {bundle.group for bundle in left}
        filling.take_first(left)
        untouched -= {bundle.group for bundle in filling.bundles}
        num_places = self._settings.max_groups - len(state.assigned)
        newly = [one for one in islice(state.offered, num_places) if one not in untouched]
        for group in newly:
            state.offered.remove(group)
            state.assigned[group] = None
        state.pending = [bundle for bundle in left if bundle.group in state.assigned]
        return tuple(newly)

    def _fill(self, filling: Filling) -> tuple[str, ...]:
        """What is left of assigned groups first, the largest that fits; then offered groups."""
        newly: list[str] = []
        pending = self._state.pending
        while True:
            filling.take_from(pending)
            if pending or not self._reach(filling, newly):
                return tuple(newly)

    def _reach(self, filling: Filling, newly: list[str]) -> bool:
        """Assign the next offered group if it is prepared and its largest bundle still fits."""
        state = self._state
        if not state.offered or len(state.assigned) >= self._settings.max_groups:
            return False
        prepared = self._bundles_of(state.offered[0])
        if prepared is None:
            return False
        bundles = list(prepared)
        sort_for_packing(bundles)
        if bundles and not filling.has_room_for(bundles[0]):
            return False
        group = state.offered.popleft()
        state.assigned[group] = None
        newly.append(group)
        state.pending.extend(bundles)
        return True

    def _whole_groups(self, bundles: Sequence[Bundle]) -> tuple[str, ...]:
        """Groups of `bundles` of which no living member holds or did anything."""
        held = {one.group for issued in self._state.issued.values() for one in issued.bundles}
        return tuple(dict.fromkeys(one.group for one in bundles if one.group not in held))


def _counts_of(made: MicroStep) -> StepCounts:
    return StepCounts(
        num_executions=execution_share(made),
        num_tokens=made.num_trained_tokens,
        micro_steps=[made.number],
    )
