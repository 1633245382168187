"""Which lane a new request goes to."""

from collections.abc import Sequence

import attrs

RUNNING_TOKENS = 256
"""What a running request weighs besides the tokens that it holds: those that it will still generate. An
estimate; it matters only between lanes that hold and owe about the same."""


@attrs.frozen
class LaneLoad:
    """What one lane holds and owes."""

    queued_prompt_tokens: int
    """Prompt tokens not computed yet, of waiting and of partly prefilled requests."""
    running: int
    """Requests that hold a row."""
    free_blocks: int
    """Blocks that could be given out now; cached blocks that nobody uses count."""
    total_blocks: int
    """All blocks that requests can hold."""
    free_rows: int
    block_size: int
    """Tokens in a block."""

    def blocks(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def can_ever_hold(self, prompt_tokens: int) -> bool:
        """Whether the empty lane could hold the prompt and its first generated token."""
        return self.blocks(prompt_tokens + 1) <= self.total_blocks

    def can_start(self, prompt_tokens: int) -> bool:
        """Whether a row is free, and blocks for the prompt after all that is queued before it."""
        return (
            self.free_rows > 0 and self.blocks(self.queued_prompt_tokens + prompt_tokens) <= self.free_blocks
        )

    @property
    def work_tokens(self) -> int:
        """Tokens to compute, held, and expected from the running requests."""
        held = (self.total_blocks - self.free_blocks) * self.block_size
        return self.queued_prompt_tokens + held + RUNNING_TOKENS * self.running


def choose_lane(loads: Sequence[LaneLoad], request_prompt_tokens: int) -> int:
    """The index of the lane that the request should go to, for good.

    Lanes that could hold it come before those that never can, then lanes where it can start at once before
    those where it must wait; among equals the least work wins, then the lowest index. Raises ``ValueError``
    if there is no lane.
    """
    if not loads:
        raise ValueError("there is no lane to choose from: pass the load of at least one")

    def rank(lane: int) -> tuple[bool, bool, int, int]:
        load = loads[lane]
        never = not load.can_ever_hold(request_prompt_tokens)
        later = not load.can_start(request_prompt_tokens)
        return never, later, load.work_tokens, lane

    return min(range(len(loads)), key=rank)
