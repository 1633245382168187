"""A paged cache that knows what stands in each place, and who put it there."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle_text import Ints


class OracleError(AssertionError):
    """What was handed over contradicts the contract, or what was handed over before."""


def require(holds: Any, what: str) -> None:
    if not holds:
        raise OracleError(what)


class PagedMemory:
    """The blocks of one lane. Each place holds a token and its position, each block the name of its owner.

    An owner is a row together with a count of those who had the row, so a block that a request left behind
    does not pass for that of the next one on the same row.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self._size = block_size
        self._places: Ints = np.full((blocks, block_size, 2), -1, np.int64)
        self._owners: list[tuple[int, int] | None] = [None] * blocks

    def write(self, owner: tuple[int, int], blocks: Ints, start: int, tokens: Sequence[int] | Ints) -> None:
        """Put tokens at positions from `start` on.

        A block is taken over with its first place. Further places belong to whoever took it.
        """
        positions = np.arange(start, start + len(tokens))
        for index in range(start // self._size, (start + len(tokens) - 1) // self._size + 1):
            block = int(blocks[index])
            require(block != 0, f"{owner} writes block 0, which belongs to nobody")
            if index * self._size >= start:
                self._owners[block] = owner
            require(
                self._owners[block] == owner,
                f"row and holder {owner} write block {block} of {self._owners[block]}",
            )
        where = blocks[positions // self._size], positions % self._size
        self._places[where] = np.stack((np.asarray(tokens), positions), axis=1)

    def read(self, blocks: Ints, end: int, row: int) -> Ints:
        """The tokens at positions 0 to `end`."""
        positions = np.arange(end)
        places = self._places[blocks[positions // self._size], positions % self._size]
        require(
            (places[:, 1] == positions).all(),
            f"row {row} finds positions {places[:, 1].tolist()} where 0 to {end} should be",
        )
        return np.ascontiguousarray(places[:, 0])

    def used(self, end: int) -> int:
        """How many blocks `end` tokens take."""
        return -(-end // self._size)
