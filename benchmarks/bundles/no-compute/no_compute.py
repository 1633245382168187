"""An adapter that computes nothing: it returns the same tokens or logits in every step, already on the host.

What a step costs with it is what the engine and the plugin cost. So it does not even cut its answer to the
rows of the step where they are all there: a tensor operation takes as long as much of the plugin's work.
"""

from typing import Any

import torch

TOKEN = 7


class NoComputeForCausalLM:
    """Samples on the device where it may: then a step is all host work but the sampling."""

    decode_input_update_contract = 1
    model_capabilities = {  # noqa: RUF012 - the contract asks for a plain dictionary on the class
        "supports_sample_on_device": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "folds_dp_into_lanes": True,
    }

    def __init__(self, rows: int, vocab: int) -> None:
        self._rows = rows
        self._tokens = torch.full((rows,), TOKEN, dtype=torch.int32)
        self._logits = torch.zeros(rows, 1, vocab)
        self._logits[:, :, TOKEN] = 1.0

    @classmethod
    def initialize_vllm_model(
        cls, hf_config: Any, mesh_device: Any, max_batch_size: int, **_: Any
    ) -> "NoComputeForCausalLM":
        return cls(max_batch_size, hf_config.vocab_size)

    def allocate_kv_cache(self, shape: Any, dtype: Any, num_layers: int) -> None:
        """Nothing is cached."""

    def warmup_model_prefill(self, **_: Any) -> None:
        """Nothing to compile."""

    def warmup_model_decode(self, **_: Any) -> None:
        """Nothing to compile."""

    def prefill_forward(self, *, tokens: torch.Tensor, sampling_params: Any = None, **_: Any) -> torch.Tensor:
        return self._answer(len(tokens), sampling_params)

    def decode_forward(self, *, tokens: torch.Tensor, sampling_params: Any = None, **_: Any) -> torch.Tensor:
        return self._answer(len(tokens), sampling_params)

    def _answer(self, rows: int, sampling_params: Any) -> torch.Tensor:
        answer = self._tokens if sampling_params is not None else self._logits
        return answer if rows == self._rows else answer[:rows]
