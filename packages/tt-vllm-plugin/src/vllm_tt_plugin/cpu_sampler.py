"""vLLM's sampler, with the same answers in less time on a CPU.

Where vLLM works on whole batches of whole vocabularies, as suits a GPU, this looks only at what a row asks
for: penalties touch the tokens that were seen, top-k and top-p sort no indices, nothing is drawn for greedy
rows. Rows with a seed give vLLM's tokens to the bit, given the same generator. Rows without one take a single
random number each, where vLLM takes one for each token of the vocabulary: the same probabilities, in a tenth
of the time.

Shapes: R rows, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler

Ids = npt.NDArray[np.int64]

_NEVER = float("-inf")
_GIVES_PROCESSED = ("processed_logits", "processed_logprobs")


@dataclass
class RowMetadata(SamplingMetadata):
    """vLLM's metadata, and which rows each part of it is for. Its own dense masks and prompts stay None."""

    limits: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Top-k (V where unlimited) and top-p of the rows that are drawn at random."""
    prompts: dict[int, Ids] = field(default_factory=dict)
    """Tokens in the prompts of rows with penalties, each once, ascending."""
    allowed: dict[int, list[int]] = field(default_factory=dict)
    """Token ids of rows that allow only some."""


class CpuSampler(Sampler):
    """Takes ``RowMetadata``; otherwise used as vLLM's own."""

    @staticmethod
    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        """NumPy's argmax is vectorised, and 10 times faster than torch's. Both pick the first of equals."""
        return _argmax(logits)

    @staticmethod
    def gather_logprobs(
        logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        top = logprobs.topk(num_logprobs, dim=-1)
        tokens = token_ids.unsqueeze(-1)
        own = logprobs.gather(-1, tokens)
        ranks = np.count_nonzero(logprobs.numpy() >= own.numpy(), axis=-1)
        return LogprobsTensors(
            torch.cat((tokens, top.indices), dim=1).int(),
            torch.cat((own, top.values), dim=1),
            torch.from_numpy(ranks),
        )

    def apply_logits_processors(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool
    ) -> torch.Tensor:
        assert isinstance(sampling_metadata, RowMetadata)
        for row, ids in sampling_metadata.allowed.items():
            kept = logits[row, ids]
            logits[row] = _NEVER
            logits[row, ids] = kept
        processed: torch.Tensor = super().apply_logits_processors(
            logits, sampling_metadata, predict_bonus_token
        )
        return processed

    @staticmethod
    def apply_penalties(
        logits: torch.Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        assert isinstance(sampling_metadata, RowMetadata)
        if sampling_metadata.prompts:
            penalise_seen(logits, sampling_metadata, output_token_ids)
        return logits

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        logprobs_mode_override: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        metadata = sampling_metadata
        assert isinstance(metadata, RowMetadata)
        if metadata.all_greedy or (logprobs_mode_override or self.logprobs_mode) in _GIVES_PROCESSED:
            whole: tuple[torch.Tensor, torch.Tensor | None] = super().sample(
                logits, metadata, logprobs_mode_override
            )
            return whole
        assert metadata.temperature is not None, "some row is random"
        sampled = torch.zeros(len(logits), dtype=torch.int64) if metadata.all_random else _argmax(logits)
        logits = self.apply_temperature(logits, metadata.temperature, metadata.all_random)
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        for row, (top_k, top_p) in metadata.limits.items():
            sampled[row] = draw(logits[row], top_k, top_p, metadata.generators.get(row))
        return sampled, None


def penalise_seen(logits: torch.Tensor, metadata: RowMetadata, outputs: list[list[int]]) -> None:
    """vLLM's arithmetic for the three penalties, in place, on the tokens that a row has seen."""
    seen = [_seen(prompt, outputs[row], logits.shape[1]) for row, prompt in metadata.prompts.items()]
    rows = torch.tensor(list(metadata.prompts)).repeat_interleave(torch.tensor([len(ids) for ids, _ in seen]))
    tokens = torch.from_numpy(np.concatenate([ids for ids, _ in seen]))
    counts = torch.from_numpy(np.concatenate([times for _, times in seen]))
    part = logits[rows, tokens]
    repetition = metadata.repetition_penalties[rows]
    part *= torch.where(part > 0, 1.0 / repetition, repetition)
    part -= metadata.frequency_penalties[rows] * counts
    part -= metadata.presence_penalties[rows] * (counts > 0)
    logits[rows, tokens] = part


def _seen(prompt: Ids, output: list[int], vocab: int) -> tuple[Ids, Ids]:
    """The tokens of a request, each once, and how often each was generated; placeholders (-1) are none."""
    generated, times = np.unique(np.array(output, np.int64), return_counts=True)
    ids = np.union1d(prompt, generated)
    counts = np.zeros(len(ids), np.int64)
    counts[np.searchsorted(ids, generated)] = times
    valid = (ids >= 0) & (ids < vocab)
    return ids[valid], counts[valid]


def draw(row: torch.Tensor, top_k: int, top_p: float, generator: torch.Generator | None) -> int:
    """A token drawn from what top-k (V is none) and top-p leave of ``[V]`` logits."""
    if not np.isfinite(row.numpy().max()):
        return 0  # vLLM's probabilities are all NaN then, and it takes the first
    if top_k >= len(row) and top_p >= 1.0:
        return _pick(row.softmax(dim=-1), generator)
    kept = kept_ids(row, top_k, top_p, any_of_equals=generator is None)
    masked = torch.full_like(row, _NEVER)
    masked[kept] = row[kept]
    probs = masked.softmax(dim=-1)
    return int(kept[_pick(probs[kept], None)]) if generator is None else _pick(probs, generator)


def _pick(probs: torch.Tensor, generator: torch.Generator | None) -> int:
    if generator is not None:
        return int(_argmax(probs.div_(torch.empty_like(probs).exponential_(generator=generator))))
    reached = probs.cumsum(dim=-1, dtype=torch.float64)
    mark = torch.rand((), dtype=torch.float64) * reached[-1]
    return min(int(torch.searchsorted(reached, mark, right=True)), len(probs) - 1)


def kept_ids(row: torch.Tensor, top_k: int, top_p: float, any_of_equals: bool) -> torch.Tensor:
    """Ids that vLLM's top-k and top-p leave of ``[V]`` logits, ascending.

    The nucleus is found by its lowest value, from sorted values alone; vLLM sorts indices along, which takes
    ten times as long. If that value occurs more often than it is kept, vLLM's choice depends on its sort:
    ``any_of_equals`` says that another choice will do.
    """
    values, size = row.numpy(), len(row)
    ordered = torch.full_like(row, _NEVER)
    if top_k < size:
        kept = np.flatnonzero(values >= row.topk(top_k).values[-1].item())
        if top_p >= 1.0:
            return torch.from_numpy(kept)
        ordered[size - len(kept) :] = torch.from_numpy(np.sort(values[kept]))
    else:
        ordered = torch.from_numpy(np.sort(values))
    reached = ordered.softmax(dim=-1).cumsum(dim=-1)
    dropped = min(int((reached <= 1 - torch.tensor(top_p)).sum()), size - 1)
    lowest = ordered[dropped].item()
    above, equal = np.flatnonzero(values > lowest), np.flatnonzero(values == lowest)
    wanted = size - dropped - len(above)
    if wanted < len(equal) and not any_of_equals:
        left = apply_top_k_top_p_pytorch(row[None].clone(), torch.tensor([top_k]), torch.tensor([top_p]))
        return (left[0] > _NEVER).nonzero()[:, 0]
    return torch.from_numpy(np.union1d(above, equal[len(equal) - wanted :]))


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(scores.detach().numpy().argmax(axis=-1)))
