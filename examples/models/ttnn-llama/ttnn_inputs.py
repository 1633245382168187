"""What goes to the devices: tensors, chunks of prompts, and the inputs of decodes, which stay there."""

from dataclasses import dataclass
from typing import Any

import torch
import ttnn
from torch import Tensor
from tt_sampling import TTSamplingParams

ROWS = 32
"""Rows of a decode: fewer would cost the same, for a tile has 32."""


def put(
    mesh: Any,
    value: Tensor,
    dtype: Any = ttnn.bfloat16,
    layout: Any = ttnn.TILE_LAYOUT,
    split: int | None = None,
    on_device: bool = True,
) -> Any:
    """`value` on all devices of a mesh of one row, or cut into equal parts along the dimension `split`."""
    mapper = ttnn.ShardTensor2dMesh(mesh, dims=(None, split), mesh_shape=tuple(mesh.shape))
    device = mesh if on_device else None
    return ttnn.from_torch(value, dtype=dtype, layout=layout, device=device, mesh_mapper=mapper)


def integers(mesh: Any, value: Tensor, dtype: Any, on_device: bool = True) -> Any:
    """Ids, positions or page tables, which are not in tiles."""
    return put(mesh, value, dtype, ttnn.ROW_MAJOR_LAYOUT, on_device=on_device)


@dataclass(frozen=True)
class Chunk:
    """A part of one prompt, padded to S tokens, that begins where a block of it begins; on the devices."""

    tokens: Any  # uint32 [1, S]
    positions: Any  # uint32 [1, S]
    start: Any  # int32 [1] the first position
    last: Any  # uint32 [1, 32] where in the chunk its last token is, 32 times
    page_table: Any  # int32 [1, W] blocks of the whole prompt
    own_blocks: Any  # int32 [1, W] blocks of the chunk

    @classmethod
    def put(
        cls, mesh: Any, tokens: Tensor, start: int, size: int, blocks: Tensor, own_blocks: Tensor, limit: int
    ) -> "Chunk":
        """Up to `size` of a prompt's `tokens` from `start` on. The padding's positions stay under `limit`."""
        end = min(start + size, len(tokens))
        padded = torch.zeros(1, size, dtype=torch.int32)
        padded[0, : end - start] = tokens[start:end]
        positions = torch.arange(start, start + size, dtype=torch.int32).clamp(max=limit - 1)
        return cls(
            tokens=integers(mesh, padded, ttnn.uint32),
            positions=integers(mesh, positions[None], ttnn.uint32),
            start=integers(mesh, torch.tensor([start], dtype=torch.int32), ttnn.int32),
            last=integers(mesh, torch.full((1, ROWS), end - start - 1, dtype=torch.int32), ttnn.uint32),
            page_table=integers(mesh, blocks, ttnn.int32),
            own_blocks=integers(mesh, own_blocks, ttnn.int32),
        )


class Resident:
    """Inputs of 32 rows, at addresses that stay: traces read them there.

    Only reload commands and sampled tokens change them.
    """

    def __init__(self, mesh: Any, width: int) -> None:
        """`width`: blocks of a row, as wide as any page table may be."""
        self._mesh = mesh
        self.tokens = integers(mesh, torch.zeros(1, ROWS, dtype=torch.int32), ttnn.uint32)
        self.positions = integers(mesh, _nowhere(), ttnn.int32)
        self.page_table = integers(mesh, torch.zeros(ROWS, width, dtype=torch.int32), ttnn.int32)
        self._drawn_at = [0] * ROWS

    def load(self, tokens: Tensor, positions: Tensor) -> None:
        """int32 [B, 1] and [B]; the rows from B on are empty."""
        rows, padded = _nowhere(), torch.zeros(1, ROWS, dtype=torch.int32)
        rows[: len(positions)] = positions
        padded[0, : len(tokens)] = tokens[:, 0]
        self._write(self.positions, rows)
        self._write(self.tokens, padded)
        self._drawn_at = (rows + 1).tolist()

    def load_page_table(self, blocks: Tensor) -> None:
        """int32 [B, W]."""
        self._write(self.page_table, self.padded(blocks, ROWS))

    def padded(self, blocks: Tensor, rows: int) -> Tensor:
        """Block ids [n, w] as [rows, W]; the rest is block 0, which vLLM gives to no request."""
        table = torch.zeros(rows, self.page_table.shape[1], dtype=torch.int32)
        table[: len(blocks), : blocks.shape[1]] = blocks
        return table

    def advance(self, ids: Any) -> None:
        """Go on from the ids, uint32 [1, 1, 1, 32], that a step draws. Enqueues, so it may be in a trace."""
        ttnn.copy(ttnn.reshape(ids, (1, ROWS)), self.tokens)
        ttnn.plus_one(self.positions, skip_negative_entries=True)

    def count(self) -> list[int]:
        """Positions of the tokens that the step draws which comes next, known to the host without a read."""
        drawn_at = self._drawn_at
        self._drawn_at = [position + (position > 0) for position in drawn_at]
        return drawn_at

    def _write(self, target: Any, value: Tensor) -> None:
        ttnn.copy_host_to_device_tensor(integers(self._mesh, value, target.dtype, on_device=False), target)


def _nowhere() -> Tensor:
    return torch.full((ROWS,), -1, dtype=torch.int32)


def params_of(row: int, params: TTSamplingParams) -> TTSamplingParams:
    """One row's parameters, for all 32."""
    return TTSamplingParams(**{name: [values[row]] * ROWS for name, values in vars(params).items()})


def params_of_all(params: TTSamplingParams) -> TTSamplingParams:
    """Parameters of B rows, for 32."""
    rest = vars(TTSamplingParams.neutral(ROWS - len(params.temperature)))
    return TTSamplingParams(**{name: [*values, *rest[name]] for name, values in vars(params).items()})
