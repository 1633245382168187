"""vLLM's worker: opens the mesh, loads the model, and hands steps to the runner."""

import os
from typing import TYPE_CHECKING, Any

import torch
from tt_registry import Capabilities
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_tt_plugin import kv_cache
from vllm_tt_plugin.adapter import Adapter
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.data_parallel import bind_devices
from vllm_tt_plugin.device_sampling import DeviceSampler
from vllm_tt_plugin.host_sampling import HostSampler
from vllm_tt_plugin.mesh import HostMesh, Mesh, MeshSpec
from vllm_tt_plugin.plan import StepPlan
from vllm_tt_plugin.requests import RequestTable
from vllm_tt_plugin.runner import TTRunner
from vllm_tt_plugin.served_model import ServedModel
from vllm_tt_plugin.shutdown import uninterrupted
from vllm_tt_plugin.warmup import ProgramWatch, warm_up

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput


class TTWorker(WorkerBase):
    """The one process that holds the mesh."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bind_devices(self.vllm_config, os.environ)
        self._tt_config = TTConfig.from_additional_config(self.vllm_config.additional_config)
        self._served = ServedModel.find(self.model_config.architectures, os.environ)
        self._mesh: Mesh | None = None
        self._adapter: Adapter | None = None
        self._runner: TTRunner | None = None
        self._programs: ProgramWatch | None = None

    @property
    def _capabilities(self) -> Capabilities:
        return self._served.capabilities

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        # vLLM's default seed means that nobody asked for repeatable runs.
        if self.model_config.seed:
            torch.manual_seed(self.model_config.seed)
        else:
            torch.seed()
        self._mesh = open_mesh(self._tt_config, self._capabilities)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        assert self._mesh is not None, "init_device comes first"
        self._adapter = Adapter.load(
            self._served.adapter_class,
            self._capabilities,
            self._mesh,
            self._tt_config,
            self.vllm_config,
        )

    def get_model(self) -> Any:
        return self._loaded.model

    @property
    def _loaded(self) -> Adapter:
        assert self._adapter is not None, "load_model comes first"
        return self._adapter

    @property
    def _num_devices(self) -> int:
        assert self._mesh is not None, "init_device comes first"
        return self._mesh.shape[0] * self._mesh.shape[1]

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        described = kv_cache.adapter_specs(self._served.adapter_class, self._capabilities, self.vllm_config)
        return described or kv_cache.plain_specs(self.vllm_config, self._num_devices)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Adapters lay their caches out themselves, so every layout is as good as another."""
        return [layout.name for layout in KVCacheLayout]

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's planner that give the number of blocks the adapter's token budget asks for."""
        if self.cache_config.kv_cache_memory_bytes is not None:
            return int(self.cache_config.kv_cache_memory_bytes)
        tokens = kv_cache.max_tokens(self._served.adapter_class, self.vllm_config, self._num_devices)
        return kv_cache.bytes_for(self.get_kv_cache_spec(), tokens)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        width = kv_cache.blocks_per_request(self.vllm_config, kv_cache_config)
        self._loaded.allocate(kv_cache.layer_caches(kv_cache_config), width)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        host_sampler = HostSampler(self.vllm_config)
        custom = host_sampler.has_custom_processors
        mode = self.model_config.logprobs_mode
        device_sampler = DeviceSampler.of(self._tt_config, self._capabilities, custom, mode)
        if self._tt_config.enable_model_warmup:
            warm_up(self._loaded, can_sample_on_device=device_sampler.may_sample)
        self._loaded.note_decode_sizes()
        requests = RequestTable(self._loaded.max_rows, self._loaded.page_tables.groups)
        overlap = bool(self.vllm_config.scheduler_config.async_scheduling)
        self._runner = TTRunner(self._loaded, requests, host_sampler, device_sampler, overlap)
        self._programs = ProgramWatch(self._loaded.mesh.device)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        assert self._runner is not None, "compile_or_warm_up_model comes first"
        assert isinstance(scheduler_output, StepPlan), "TTScheduler plans the steps of this worker"
        output = self._runner.execute(scheduler_output)
        if self._programs is not None:
            self._programs.look(scheduler_output.phase)
        return output

    def sample_tokens(
        self, grammar_output: "GrammarOutput | None"
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        assert self._runner is not None, "compile_or_warm_up_model comes first"
        return self._runner.sample(grammar_output)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def synchronize_device(self) -> None:
        """Wait for the decodes under way."""
        if self._runner is not None:
            self._runner.drain()

    def reset_encoder_cache(self) -> None:
        """A pause that clears the caches asks for it; no encoder's output is kept here."""

    def shutdown(self) -> None:
        with uninterrupted():
            self._runner = self._adapter = None
            if self._mesh is not None:
                self._mesh.close()


def open_mesh(config: TTConfig, capabilities: Capabilities) -> Mesh:
    """The mesh that ``MESH_DEVICE`` asks for. Raises ``MeshError`` or ``ConfigurationError``."""
    spec = MeshSpec.parse(os.environ.get("MESH_DEVICE"))
    if spec.on_host:
        assert spec.shape is not None, "a host mesh has a shape"
        return HostMesh.open(spec.shape)
    from vllm_tt_plugin.mesh_ttnn import TtnnMesh

    return TtnnMesh.open(spec.shape, config, capabilities.fabric_config or {})
