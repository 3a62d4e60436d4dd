"""How long the parts of a reduction may take, and how many groups are kept.

Owns: the numbers, for the members and for the controller that waits for them. Invariants: a member
gives up before the controller does, so who does not answer in time hangs; what the controller takes
for a made group is kept by all its members.
"""

from dataclasses import dataclass

CHUNK_BYTES = 16 * 2**20
NUM_KEPT = 8
"""The latest groups, by use. The members of one see no other group that the controller does not see
too, so with the same number here and there none that it names is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """At the members: all have met after `meet_s` and are connected after `connect_s`, a chunk went
    through after `stall_s`, all of them after `reduce_s`. At the controller: a member stands still
    after `settle_s`, and has shared its sums or pulled those of others after `star_s`; it is given
    `grace_s` more than it gives itself."""

    meet_s: float = 2.0
    connect_s: float = 2.5
    stall_s: float = 5.0
    reduce_s: float = 60.0
    grace_s: float = 5.0
    settle_s: float = 15.0
    star_s: float = 60.0

    @property
    def construct_s(self) -> float:
        """A group is made."""
        return self.meet_s + self.connect_s

    @property
    def answer_s(self) -> float:
        """The controller waits this long for the answers of a group."""
        return self.construct_s + self.reduce_s + self.stall_s + self.grace_s

    @property
    def late_s(self) -> float:
        """And this long once one member has failed: others that miss it give up by then."""
        return max(self.construct_s, self.stall_s) + self.grace_s


DEFAULT = GroupLimits()
