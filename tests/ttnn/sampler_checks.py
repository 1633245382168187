"""Checks of the sampler on a mock cluster, in a process of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import ttnn
from tt_mock.ttnn_shadows import Shadows
from tt_sampling import (
    ParamsError,
    RowParams,
    ShapeError,
    TTSamplingParams,
    pack,
    probabilities,
    ttnn_sampler,
)
from tt_sampling.ttnn_sampler import ROWS, TtnnSampler

VOCAB = 4096
MIXED = [
    RowParams(temperature=0.0),
    RowParams(temperature=0.8, top_k=5, seed=2**40 + 1),
    RowParams(temperature=1.5, top_k=32, top_p=0.7, seed=-3),
    RowParams(temperature=3.0, top_k=1, top_p=0.2),
    RowParams(temperature=1.0, top_k=20),
]


def bfloat16_logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(1, 1, ROWS, vocab, generator=torch.Generator().manual_seed(seed)).mul(3).bfloat16()


def rows_of(asked: list[RowParams]) -> TTSamplingParams:
    """`asked` again and again, to 32 rows."""
    return pack([asked[row % len(asked)] for row in range(ROWS)], ROWS)


class Checks:
    """Methods are checks; each gets its own shadows."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.shadows = Shadows(mesh)
        ttnn_sampler.ttnn = self.shadows  # type: ignore[attr-defined]

    def on_mesh(self, logits: torch.Tensor) -> Any:
        mapper = self.shadows.ShardTensor2dMesh(self.mesh, dims=(None, 3), mesh_shape=tuple(self.mesh.shape))
        return self.shadows.from_torch(
            logits, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=self.mesh, mesh_mapper=mapper
        )

    def drawn(self, sampler: TtnnSampler, logits: torch.Tensor, position: int = 4) -> torch.Tensor:
        """Token ids [32]; all devices must have the same."""
        sampler.seed([position] * ROWS)
        ids = self.shadows.of(sampler.sample(self.on_mesh(logits)).ids)
        assert all(torch.equal(part, ids[0]) for part in ids)
        tokens: torch.Tensor = ids[0].flatten()
        return tokens

    def check_tokens_are_such_as_the_parameters_leave(self) -> None:
        sampler, params = TtnnSampler(self.mesh, VOCAB), rows_of(MIXED)
        sampler.load(params)
        for seed in range(3):
            logits = bfloat16_logits(seed)
            ids, scores = self.drawn(sampler, logits), logits[0, 0].float()
            for row in range(ROWS):
                if params.top_k[row] == 1 or params.temperature[row] == 0:
                    assert scores[row, ids[row]] == scores[row].max(), row
                else:
                    left = probabilities(
                        scores[row, None], [params.temperature[row]], [params.top_k[row]], [params.top_p[row]]
                    )
                    assert left[0, ids[row]] > 0, row

    def check_logprobs_are_those_of_the_whole_vocabulary(self) -> None:
        sampler = TtnnSampler(self.mesh, VOCAB)
        sampler.load(rows_of(MIXED))
        sampler.seed([0] * ROWS)
        logits = bfloat16_logits(7)
        placed = self.on_mesh(logits)
        values, ids = sampler.logprobs(placed, sampler.sample(placed))
        assert (values.dtype, tuple(values.shape)) == (ttnn.float32, (1, 1, ROWS, 32))
        assert (ids.dtype, tuple(ids.shape)) == (ttnn.int32, (1, 1, ROWS, 32))
        raw = logits[0, 0].float().log_softmax(-1)
        expected = raw.topk(32, dim=-1).values
        for found, of in zip(self.shadows.of(values), self.shadows.of(ids), strict=True):
            torch.testing.assert_close(found[0, 0].float(), expected, atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(raw.gather(1, of[0, 0]), expected)

    def check_a_seed_and_a_position_give_the_same_draw_in_any_row(self) -> None:
        sampler = TtnnSampler(self.mesh, VOCAB)
        logits = bfloat16_logits()[:, :, :1].expand(-1, -1, ROWS, -1).contiguous()
        sampler.load(rows_of([RowParams(top_k=32, seed=11)]))
        there = [self.drawn(sampler, logits, position) for position in range(6)]
        assert all(len(set(ids.tolist())) == 1 for ids in there)
        assert len({int(ids[0]) for ids in there}) > 1
        sampler.load(rows_of([RowParams(top_k=32)]))
        first, second = self.drawn(sampler, logits), self.drawn(sampler, logits)
        assert len(set(first.tolist())) > 1
        assert first.tolist() != second.tolist()

    def check_nothing_is_compiled_after_the_first_step(self) -> None:
        sampler, logits = TtnnSampler(self.mesh, VOCAB), self.on_mesh(bfloat16_logits())
        sampler.load(rows_of(MIXED))
        sampler.seed([0] * ROWS)
        sampler.logprobs(logits, sampler.sample(logits))
        self.mesh.set_program_cache_misses_allowed(False)
        try:
            for step in range(4):
                sampler.load(rows_of([RowParams(temperature=0.5 + step, top_k=3 + step, seed=step)]))
                sampler.seed(range(step, step + ROWS))
                sampler.logprobs(logits, sampler.sample(logits))
        finally:
            self.mesh.set_program_cache_misses_allowed(True)

    def check_a_real_vocabulary_is_taken(self) -> None:
        """Llama 3's: 128256 tokens, an odd number of tiles on each of eight devices."""
        sampler = TtnnSampler(self.mesh, 128_256)
        sampler.load(rows_of(MIXED))
        logits = bfloat16_logits(3, 128_256)
        ids = self.drawn(sampler, logits)
        assert logits[0, 0, 0, ids[0]] == logits[0, 0, 0].max()

    def check_what_is_read_back(self) -> None:
        sampler = TtnnSampler(self.mesh, VOCAB)
        sampler.load(rows_of(MIXED))
        sampler.seed([0] * ROWS)
        drawn = sampler.sample(self.on_mesh(bfloat16_logits()))
        assert tuple(ttnn_sampler.on_host(drawn.ids).shape) == (1, 1, 1, ROWS)
        assert (drawn.ids.dtype, drawn.ids.layout) == (ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT)
        columns = 32 * tuple(self.mesh.shape)[1]
        assert [tuple(part.shape) for part in drawn.candidates] == [(1, 1, ROWS, columns)] * 2

    def check_what_the_device_cannot_do_is_refused(self) -> None:
        sampler = TtnnSampler(self.mesh, VOCAB)
        refused(ShapeError, lambda: TtnnSampler(self.mesh, VOCAB + 1), f"a vocabulary of {VOCAB + 1}")
        refused(ParamsError, lambda: sampler.load(rows_of([RowParams()])), "top_k=0")
        refused(ParamsError, lambda: sampler.load(rows_of([RowParams(top_k=33)])), "top_k=33")
        penalised = rows_of([RowParams(temperature=0.0, presence_penalty=1.0)])
        refused(ParamsError, lambda: sampler.load(penalised), "penalties")
        refused(ParamsError, lambda: sampler.load(TTSamplingParams.neutral(4)), "4 rows")


def refused(kind: type[Exception], call: Callable[[], Any], told: str) -> None:
    with pytest.raises(kind, match=told):
        call()
