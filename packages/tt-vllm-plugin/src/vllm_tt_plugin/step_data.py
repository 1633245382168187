"""What goes into a step of a model, and what comes out of it.

Shapes: N prefilled requests, S the longest end position, B rows of a decode, W blocks per request, V
vocabulary.
"""

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from tt_sampling import TTSamplingParams

from vllm_tt_plugin.images import PrefillImages


@attrs.frozen
class PrefillInputs:
    """Chunks of N requests: the model computes ``tokens[i, start_pos[i]:prompt_lens[i]]``."""

    tokens: torch.Tensor
    """int32 ``[N, S]`` from position 0, right padded with 0."""
    page_table: torch.Tensor
    """int32 ``[N, W]``."""
    prompt_lens: npt.NDArray[np.int64]
    """End position of each chunk ``[N]``."""
    start_pos: npt.NDArray[np.int32]
    """Tokens already in the cache ``[N]``."""
    empty_slots: list[int]
    """The row each request's state is written to."""
    page_tables_per_layer: list[torch.Tensor] | None = None
    """int32 ``[capacity, W]`` for each layer, where there are several KV cache groups."""
    images: PrefillImages | None = None


@attrs.frozen
class DecodeInputs:
    """One token for each row; rows whose position is -1 are passed over.

    Tokens and positions are old where the model was not told to reload its inputs.
    """

    tokens: torch.Tensor
    """int32 ``[B, 1]``."""
    start_pos: torch.Tensor
    """int32 ``[B]``."""
    page_table: torch.Tensor
    """int32 ``[B, W]``."""
    page_tables_per_layer: list[torch.Tensor] | None = None
    """int32 ``[capacity, W]`` for each layer, where there are several KV cache groups."""
    rope_deltas: list[int] | None = None
    """By row, up to the highest one that decodes; None where they are those of the last decode."""


@attrs.frozen
class DeviceSampling:
    """What a step that is sampled on the device needs; token histories only where a row has a penalty."""

    params: TTSamplingParams
    prompt_tokens: torch.Tensor | None = None
    output_tokens: torch.Tensor | None = None
    most_logprobs: int = attrs.field(init=False)
    """The most that a row wants, as vLLM counts them; below 0 if none wants any."""

    @most_logprobs.default
    def _most_logprobs(self) -> int:
        return max(self.params.num_logprobs, default=-1)


@attrs.frozen
class StepResult:
    """What a step computed, on the host: logits, or tokens sampled on the device with their logprobs."""

    logits: torch.Tensor | None = None
    """``[N or B, V]``."""
    tokens: torch.Tensor | None = None
    """``[N or B]``."""
    logprobs: Any = None
    rope_deltas: list[int] | None = None
    """``[N]``, of a prefill whose model has RoPE positions of its own for each request."""


@attrs.frozen
class DecodeHandle:
    """A decode that the device was given; its output is on the way to the host, or there already."""

    out: Any
    events: tuple[Any, ...] | None
    """What to wait for before reading; None if the adapter gave host tensors at once."""
    sampling: DeviceSampling | None
