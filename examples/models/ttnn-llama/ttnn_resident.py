"""What the devices keep from one decode to the next, at addresses that stay: traces read it there."""

from typing import Any

import torch
import ttnn
from torch import Tensor
from ttnn_model import ROWS, TtnnLlama


class Resident:
    """Inputs of 32 rows. Only reload commands and sampled tokens change them."""

    def __init__(self, network: TtnnLlama, width: int) -> None:
        """`width`: blocks of a row, as wide as any page table may be."""
        self._put = network.put
        self.tokens = self._put(torch.zeros(1, ROWS, dtype=torch.int32), ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT)
        self.positions = self._put(self._nowhere(), ttnn.int32, ttnn.ROW_MAJOR_LAYOUT)
        self.page_table = self._put(
            torch.zeros(ROWS, width, dtype=torch.int32), ttnn.int32, ttnn.ROW_MAJOR_LAYOUT
        )
        self.drawn_at = [0] * ROWS
        """Positions of the tokens that the next step draws, counted along on the host for their seeds."""

    def load(self, tokens: Tensor, positions: Tensor) -> None:
        """int32 [B, 1] and [B]; the rows above B are empty."""
        rows = self._nowhere()
        rows[: len(positions)] = positions
        self.drawn_at = (rows + 1).tolist()
        self._write(self.positions, rows)
        padded = torch.zeros(1, ROWS, dtype=torch.int32)
        padded[0, : len(tokens)] = tokens[:, 0]
        self._write(self.tokens, padded)

    def load_page_table(self, blocks: Tensor) -> None:
        """int32 [B, W]."""
        self._write(self.page_table, padded_table(blocks, ROWS, self.page_table.shape[1]))

    def advance(self, ids: Any) -> None:
        """Go on from the ids, uint32 [1, 1, 1, 32], that a step draws. Enqueues, so it may be in a trace."""
        ttnn.copy(ttnn.reshape(ids, (1, ROWS)), self.tokens)
        ttnn.plus_one(self.positions, skip_negative_entries=True)

    def count(self) -> None:
        """A step was enqueued that advances."""
        self.drawn_at = [position + (position > 0) for position in self.drawn_at]

    @staticmethod
    def _nowhere() -> Tensor:
        return torch.full((ROWS,), -1, dtype=torch.int32)

    def _write(self, target: Any, value: Tensor) -> None:
        host = self._put(value, target.dtype, ttnn.ROW_MAJOR_LAYOUT, on_device=False)
        ttnn.copy_host_to_device_tensor(host, target)


def padded_table(blocks: Tensor, rows: int, width: int) -> Tensor:
    """Block ids [n, w] as [rows, width]; the rest is block 0, which vLLM gives to no request."""
    table = torch.zeros(rows, width, dtype=torch.int32)
    table[: len(blocks), : blocks.shape[1]] = blocks
    return table
