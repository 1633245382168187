"""Logprobs of tokens that the device sampled, in the form in which vLLM wants them."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.step_data import DeviceSampling, StepResult


def device_logprobs(
    sampling: DeviceSampling, result: StepResult, rows: Sequence[int]
) -> LogprobsTensors | None:
    """What came with the tokens of ``rows``, as vLLM's sampler gives it; None if no row asked.

    Adapters return raw logprobs, one for each row of the step, ``[B]``, or the highest of each row sorted, as
    ``(values [B, 32], ids [B, 32])``. The first of vLLM's columns is the sampled token, the others are the
    highest. Rows that did not ask hold anything. Raises ``StepError`` if the adapter returned too little.
    """
    wanted = sampling.most_logprobs
    if wanted < 0 or not rows:
        return None
    assert result.tokens is not None, "the device sampled"
    at = torch.tensor(rows)
    tokens = result.tokens.long()[at, None]
    if not isinstance(result.logprobs, tuple):
        return _of_single_values(tokens, result.logprobs, at, wanted)
    values, ids = (part.reshape(-1, part.shape[-1])[at] for part in result.logprobs)
    return _of_candidates(tokens, values.float(), ids.long(), wanted)


def _of_single_values(tokens: torch.Tensor, values: Any, at: torch.Tensor, wanted: int) -> LogprobsTensors:
    """Only argmax rows are sampled on a device that returns single values, so their rank is 1."""
    if wanted > 0 or values is None:
        given = "none" if values is None else "one for each row"
        raise StepError(
            f"the model declares device_logprobs and {wanted} were asked for, but it returned {given}; "
            "expected (values [B, 32], ids [B, 32]) from 'top32', or values [B] from 'sampled'"
        )
    logprobs = values.reshape(-1)[at].float()
    return LogprobsTensors(tokens.int(), logprobs[:, None], torch.ones(len(at), dtype=torch.int64))


def _of_candidates(
    tokens: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, wanted: int
) -> LogprobsTensors:
    """A token that is not among the candidates was drawn because it ties with the last of them."""
    matches = ids == tokens
    found = matches.any(dim=-1)
    place = torch.where(found, matches.int().argmax(dim=-1), ids.shape[1] - 1)
    own = values.gather(1, place[:, None])
    return LogprobsTensors(
        logprob_token_ids=torch.cat((tokens, ids[:, :wanted]), dim=1).int(),
        logprobs=torch.cat((own, values[:, :wanted]), dim=1),
        selected_token_ranks=(values >= own).sum(dim=-1) + ~found,
    )
