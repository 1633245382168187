"""Sampling on the device through ttnn, for models that leave their logits there, split over the vocabulary.

The only module of this package that imports ttnn (0.81 or later); the package itself does not import it. Each
device finds the 32 highest of its part of the vocabulary, all devices gather all candidates, and each then
draws the same token, since all are given the same seeds.

Shapes: 32 rows, V vocabulary, D devices that hold a part of it each, C = 32 * D candidates of a row.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import ttnn

from tt_sampling.errors import ParamsError, ShapeError
from tt_sampling.routing import DeviceCapabilities, DeviceLogprobs
from tt_sampling.seeds import step_seed
from tt_sampling.wire import TTSamplingParams, is_greedy

ROWS = 32
"""What `ttnn.sampling` takes at once: one row on each of 32 cores."""
TILE = 32
CANDIDATES = 32
"""What it draws from at most."""
_WIDEST = 4096
_SEEDS = 2**32 - 1  # the highest uint32 tells `ttnn.manual_seed` to leave a generator as it is

CAPABILITIES = DeviceCapabilities(
    can_sample=True, max_top_k=CANDIDATES, penalties=False, seeds=False, logprobs=DeviceLogprobs.TOP32
)
"""What a route may send here. Seeded requests are drawn reproducibly, but by the device's own generators: the
host would draw other tokens. So `seeds` is for a server to set that never samples them on the host."""


@attrs.frozen
class Drawn:
    """What a step left on the devices; each device of the mesh holds all of it."""

    ids: Any
    """uint32 [1, 1, 1, 32], row-major."""
    candidates: tuple[Any, Any]
    """(bfloat16 values [1, 1, 32, C], int32 ids [1, 1, 32, C]), device by device, highest first in each."""


class TtnnSampler:
    """Samples bfloat16 logits [1, 1, 32, V / D], the last dimension split along one axis of the mesh.

    Its inputs stay at fixed addresses on the device, so `sample` and `logprobs` may be captured in a trace;
    `load` and `seed` write to them in between and compile nothing.
    """

    def __init__(self, mesh: Any, vocab: int, axis: int = 1) -> None:
        """`axis`: the mesh's axis along which the vocabulary is split. Raises ShapeError where the parts
        would not be equal and of whole tiles, or where `ttnn.sampling` does not take as many candidates."""
        self._mesh, self._axis, self._shape = mesh, axis, tuple(mesh.shape)
        parts = self._shape[axis]
        if vocab % (parts * TILE) or parts & (parts - 1) or parts * CANDIDATES > _WIDEST:
            raise ShapeError(
                f"a vocabulary of {vocab} on {parts} devices; expected a multiple of {TILE} on each (pad the "
                f"output weights) of 1, 2, 4, ... {_WIDEST // CANDIDATES} devices"
            )
        self._parts = parts
        first = torch.arange(parts, dtype=torch.int32).repeat_interleave(CANDIDATES) * (vocab // parts)
        self._first_id = self._put(first.expand(1, 1, ROWS, -1), ttnn.int32, ttnn.TILE_LAYOUT, split=True)
        self._blank = self._put(torch.zeros(1, 1, ROWS, CANDIDATES), ttnn.float32, ttnn.TILE_LAYOUT)
        self._users = self._put(torch.arange(ROWS, dtype=torch.int32), ttnn.uint32)
        self._top_k = self._put(torch.ones(ROWS, dtype=torch.int32), ttnn.uint32)
        self._top_p = self._put(torch.ones(ROWS), ttnn.bfloat16)
        self._inverse_temperature = self._put(torch.ones(ROWS), ttnn.bfloat16)
        self._seeds = self._put(torch.zeros(ROWS, dtype=torch.uint32), ttnn.uint32)
        self._seed_of: Sequence[int | None] = [None] * ROWS

    def load(self, params: TTSamplingParams) -> None:
        """Upload the parameters of 32 rows. Raises ParamsError for what the device cannot do."""
        rows = range(len(params.temperature))
        if len(rows) != ROWS:
            raise ParamsError(
                f"parameters of {len(rows)} rows; ttnn.sampling takes {ROWS}: pad with neutral rows"
            )
        greedy = [is_greedy(params.temperature[row], params.top_k[row]) for row in rows]
        for row in rows:
            _check(row, params, greedy[row])
        self._write(self._top_k, [1 if greedy[row] else params.top_k[row] for row in rows], torch.int32)
        self._write(self._top_p, [1.0 if greedy[row] else params.top_p[row] for row in rows], torch.float32)
        inverse = [1.0 if greedy[row] else 1.0 / params.temperature[row] for row in rows]
        self._write(self._inverse_temperature, inverse, torch.float32)
        self._seed_of = list(params.seed)

    def seed(self, positions: Sequence[int]) -> None:
        """Seed the draw of the tokens at `positions` [32]; rows without a seed get a fresh one."""
        seeds = [
            secrets.randbelow(_SEEDS) if seed is None else step_seed(seed, position) % _SEEDS
            for seed, position in zip(self._seed_of, positions, strict=True)
        ]
        self._write(self._seeds, seeds, torch.uint32)

    def sample(self, logits: Any) -> Drawn:
        """One token for each row. Enqueues; nothing is read back."""
        values, places = ttnn.topk(logits, CANDIDATES, dim=3)
        # Places are uint16 in narrow rows and uint32 in wide ones.
        ids = ttnn.add(ttnn.typecast(places, ttnn.int32), self._first_id)
        values, ids = self._gathered(values), self._gathered(ids)
        # Seeds as a tensor: as a number each would be a program of its own.
        ttnn.manual_seed(self._seeds, user_ids=self._users)
        drawn = ttnn.sampling(
            values,
            ttnn.to_layout(ids, ttnn.ROW_MAJOR_LAYOUT),
            k=self._top_k,
            p=self._top_p,
            temp=self._inverse_temperature,
        )
        return Drawn(drawn, (values, ids))

    def logprobs(self, logits: Any, drawn: Drawn) -> tuple[Any, Any]:
        """The 32 highest of each row: (float32 logprobs [1, 1, 32, 32], int32 ids), highest first.

        ttnn has no log-softmax. Each device sums exp(x - its highest), and all gather both numbers, spread
        over a tile's width because that is what a gather moves.
        """
        wide = ttnn.typecast(logits, ttnn.float32)
        highest = ttnn.max(wide, dim=3, keepdim=True)
        total = ttnn.sum(ttnn.exp(ttnn.subtract(wide, highest)), dim=3, keepdim=True)
        highest_of_each = self._gathered(ttnn.add(self._blank, highest))
        total_of_each = self._gathered(ttnn.add(self._blank, total))
        values, ids = drawn.candidates
        top, places = ttnn.topk(values, CANDIDATES, dim=3)
        top = ttnn.typecast(top, ttnn.float32)
        best = ttnn.max(highest_of_each, dim=3, keepdim=True)
        shares = ttnn.multiply(ttnn.exp(ttnn.subtract(highest_of_each, best)), total_of_each)
        sum_of_all = ttnn.multiply(ttnn.sum(shares, dim=3, keepdim=True), 1.0 / CANDIDATES)
        logprobs = ttnn.subtract(top, ttnn.add(ttnn.log(sum_of_all), best))
        return logprobs, ttnn.gather(ids, 3, index=places)

    def _gathered(self, part: Any) -> Any:
        return part if self._parts == 1 else ttnn.all_gather(part, dim=3, cluster_axis=self._axis)

    def _mapper(self, split: bool = False) -> Any:
        dims: list[int | None] = [None, None]
        if split:
            dims[self._axis] = 3
        return ttnn.ShardTensor2dMesh(self._mesh, dims=tuple(dims), mesh_shape=self._shape)

    def _put(
        self, value: torch.Tensor, dtype: Any, layout: Any = ttnn.ROW_MAJOR_LAYOUT, split: bool = False
    ) -> Any:
        return ttnn.from_torch(
            value.contiguous(), dtype=dtype, layout=layout, device=self._mesh, mesh_mapper=self._mapper(split)
        )

    def _write(self, target: Any, values: Sequence[float], dtype: torch.dtype) -> None:
        """Replace what `target`, one number a row, holds."""
        host = ttnn.from_torch(
            torch.tensor(values, dtype=dtype),
            dtype=target.dtype,
            layout=target.layout,
            mesh_mapper=self._mapper(),
        )
        ttnn.copy_host_to_device_tensor(host, target)


def on_host(tensor: Any) -> torch.Tensor:
    """What a replicated tensor holds, read from the first device; blocks."""
    read: torch.Tensor = ttnn.to_torch(ttnn.get_device_tensors(tensor)[0])
    return read


def _check(row: int, params: TTSamplingParams, greedy: bool) -> None:
    top_k = params.top_k[row]
    if not greedy and not 1 <= top_k <= CANDIDATES:
        raise ParamsError(
            f"row {row} draws with top_k={top_k}; expected 1..{CANDIDATES}: sample other rows on the host"
        )
    penalties = (params.presence_penalty[row], params.frequency_penalty[row], params.repetition_penalty[row])
    if penalties != (0.0, 0.0, 1.0):
        raise ParamsError(
            f"row {row} has penalties {penalties}; the device applies none: sample it on the host"
        )
