"""How long a reduction in a group may take, and how many groups are kept.

Owns: the numbers, for the members and for the controller that waits for them. Invariants: a member
gives up before the controller does, so who does not answer in time hangs; what the controller takes
for a made group is kept by all its members.
"""

CONSTRUCT_S = 10.0
"""All members must have met."""
STALL_S = 5.0
"""One chunk must have gone through."""
REDUCE_S = 60.0
"""All chunks must have."""
ANSWER_S = CONSTRUCT_S + REDUCE_S + 20.0
"""The controller waits this long for a member's answer to a reduction."""
GRACE_S = 5.0
"""Once one member told of a failure, the others see it too: their connections to it are gone."""
CHUNK_BYTES = 16 * 2**20
NUM_KEPT = 8
"""The latest groups, by use. The members of one see no other group that the controller does not see
too, so with the same number here and there none that it names is gone."""
