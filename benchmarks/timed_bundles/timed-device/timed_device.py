"""An adapter with a device's timeline and none of its work.

Calls return at once. The device works them off in order, each decode in `TIMED_DEVICE_DECODE_MS`, and an
output cannot be read before its time. So a host that is late leaves the device idle, as a real one would.
"""

import os
import time
from typing import Any

import torch

TOKEN = 7


class _Output:
    """Tokens that are there at a time of `time.perf_counter`."""

    def __init__(self, tokens: torch.Tensor, ready_at: float) -> None:
        self.tokens = tokens
        self._ready_at = ready_at

    def synchronize(self) -> None:
        while (left := self._ready_at - time.perf_counter()) > 0:
            time.sleep(left)


class TimedDeviceForCausalLM:
    decode_input_update_contract = 1
    model_capabilities = {  # noqa: RUF012 - the contract asks for a plain dictionary on the class
        "supports_sample_on_device": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "folds_dp_into_lanes": True,
    }

    def __init__(self, rows: int) -> None:
        self._tokens = torch.full((rows,), TOKEN, dtype=torch.int32)
        self._decode_s = float(os.environ["TIMED_DEVICE_DECODE_MS"]) / 1e3
        self._free_at = 0.0

    @classmethod
    def initialize_vllm_model(
        cls, hf_config: Any, mesh_device: Any, max_batch_size: int, **_: Any
    ) -> "TimedDeviceForCausalLM":
        return cls(max_batch_size)

    def allocate_kv_cache(self, shape: Any, dtype: Any, num_layers: int) -> None:
        """Nothing is cached."""

    def warmup_model_prefill(self, **_: Any) -> None:
        """Nothing to compile."""

    def warmup_model_decode(self, **_: Any) -> None:
        """Nothing to compile."""

    def prefill_forward(self, *, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        """A prefill takes no time here: decodes are what is measured."""
        return self._tokens[: tokens.shape[0]]

    def decode_forward(self, *, tokens: torch.Tensor, **_: Any) -> _Output:
        self._free_at = max(self._free_at, time.perf_counter()) + self._decode_s
        return _Output(self._tokens[: tokens.shape[0]], self._free_at)

    def read_decode_output(self, out: _Output, async_read: bool) -> tuple[_Output, list[_Output]]:
        return out, [out]

    def process_decode_output_host(self, out: _Output, is_tokens: bool) -> torch.Tensor:
        return out.tokens
