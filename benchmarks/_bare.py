"""A worker for vLLM's own engine that does nothing: each step returns the same token for each request."""

import os
import time
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

TOKEN = 7


class BareWorker(WorkerBase):
    """The least that an engine needs of a worker."""

    def init_device(self) -> None:
        """No device."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """No model."""

    def get_model(self) -> Any:
        return None

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        model, cache = self.model_config, self.cache_config
        spec = FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=model.get_total_num_kv_heads(),
            head_size=model.get_head_size(),
            dtype=torch.float32,
        )
        return {
            f"model.layers.{i}.self_attn.attn": spec
            for i in range(model.get_num_layers(self.parallel_config))
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [layout.name for layout in KVCacheLayout]

    def determine_available_memory(self) -> int:
        return 256 << 20

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """No cache."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput:
        names = list(scheduler_output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] for _ in names],
        )

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def synchronize_device(self) -> None:
        """Nothing is in flight."""


class WaitingWorker(BareWorker):
    """Waits in each step as long as a device would compute."""

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput:
        if scheduler_output.total_num_scheduled_tokens == len(scheduler_output.num_scheduled_tokens):
            time.sleep(float(os.environ["TIMED_DEVICE_DECODE_MS"]) / 1e3)
        return super().execute_model(scheduler_output)
