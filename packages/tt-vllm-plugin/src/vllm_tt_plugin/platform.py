"""vLLM's view of a Tenstorrent mesh."""

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_tt_plugin import images
from vllm_tt_plugin.checks import mesh_of, problems_of, switch_off_undeclared
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.data_parallel import keep_groups, run_workers_inside_engines
from vllm_tt_plugin.errors import ConfigurationError, Problem
from vllm_tt_plugin.images import Inputs
from vllm_tt_plugin.lanes import fold_data_parallel, lanes_of
from vllm_tt_plugin.served_model import ServedModel
from vllm_tt_plugin.shutdown import let_front_ends_wait

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs import EngineInput
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger("vllm.tt_plugin")

WORKER_CLASS = "vllm_tt_plugin.worker.TTWorker"
SCHEDULER_CLASS = "vllm_tt_plugin.scheduler.TTScheduler"
LANE_SCHEDULER_CLASS = "vllm_tt_plugin.lane_scheduler.TTLaneCoordinator"

_REFUSED_PARAMETERS = {
    "prompt_logprobs": "logprobs of prompt tokens are not computed. Leave it (and echo with logprobs) out.",
    "prompt_logprob_token_ids": "logprobs of prompt tokens are not computed. Leave it out.",
    "thinking_token_budget": "thinking cannot be cut short. Leave it out, or limit max_tokens.",
}


class TTPlatform(Platform):
    """Tensors that vLLM itself touches stay on the CPU; the mesh belongs to the worker alone."""

    _enum = PlatformEnum.OOT
    device_name = "tt"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        # Both wire forms are read, but only V1 carries logits processors given on the command line.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        """Switch off what the model does not declare, before vLLM branches on it."""
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        if vllm_config.model_config is None:
            return
        try:
            settings = TTConfig.from_additional_config(vllm_config.additional_config)
            served = ServedModel.find(vllm_config.model_config.architectures, os.environ)
        except ConfigurationError:
            return  # check_and_update_config refuses it, together with everything else that is wrong
        if served.folds_data_parallel:
            fold_data_parallel(vllm_config)
        run_workers_inside_engines(vllm_config)
        switch_off_undeclared(vllm_config, settings, served.capabilities)
        images.settle(vllm_config, Inputs.of(served.adapter_class, vllm_config))
        # vllm.config itself asks for the platform while it is imported, so it cannot be imported above.
        from vllm.config.compilation import CompilationMode

        # No model of vLLM's own runs, so there is nothing for it to compile.
        vllm_config.compilation_config.mode = CompilationMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Check the whole configuration and name our worker and scheduler.

        Raises ``ConfigurationError`` with everything that is wrong. Runs in each front end and again in the
        engine, so it must change nothing the second time.
        """
        if vllm_config.model_config is None:
            return
        problems: list[Problem] = []
        settings = TTConfig()
        try:
            settings = TTConfig.from_additional_config(vllm_config.additional_config)
        except ConfigurationError as error:
            problems += error.problems
        served: ServedModel | None = None
        try:
            served = ServedModel.find(vllm_config.model_config.architectures, os.environ)
        except ConfigurationError as error:
            problems += error.problems
        # Without the model nobody knows whether its ranks would be engines or lanes.
        ranks = vllm_config.parallel_config.data_parallel_size if served is not None else 1
        mesh = mesh_of(os.environ, settings, ranks)
        problems += mesh.problems
        problems += problems_of(vllm_config, served, mesh.shape)
        if problems or served is None:
            raise ConfigurationError(problems)

        switch_off_undeclared(vllm_config, settings, served.capabilities)
        images.settle(vllm_config, Inputs.of(served.adapter_class, vllm_config))
        keep_groups(vllm_config, mesh.device_groups)
        vllm_config.parallel_config.worker_cls = WORKER_CLASS
        if vllm_config.scheduler_config.scheduler_cls not in (SCHEDULER_CLASS, LANE_SCHEDULER_CLASS):
            # Not in the engine, which has its configuration from a front end and changes it by then.
            let_front_ends_wait(vllm_config)
        lanes = lanes_of(vllm_config)
        vllm_config.scheduler_config.scheduler_cls = SCHEDULER_CLASS if lanes == 1 else LANE_SCHEDULER_CLASS
        if vllm_config.cache_config.block_size is None:
            vllm_config.cache_config.block_size = type(vllm_config.cache_config).DEFAULT_BLOCK_SIZE

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: "VllmConfig") -> None:
        """No attention backend of vLLM runs here; the block size stays what it is."""

    @classmethod
    def validate_request(
        cls, processed_inputs: "EngineInput", params: "SamplingParams | PoolingParams"
    ) -> None:
        """Raises ``VLLMValidationError``, which becomes an HTTP 400, for what no step here can compute."""
        refused = images.refused_items(processed_inputs)
        if refused:
            raise VLLMValidationError(
                f"items of {', '.join(refused)} came that are not images with pixel values: send images",
                parameter=refused[0],
            )
        for parameter, fix in _REFUSED_PARAMETERS.items():
            value = getattr(params, parameter, None)
            if value is not None:
                raise VLLMValidationError(
                    f"{parameter} is not supported on this platform: {fix}", parameter=parameter, value=value
                )

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's own kernels are not built in its empty target."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Likewise."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """The output thread of the multiprocess executor calls this and would die of the default."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """The CPU generator, which torch.manual_seed has set already, is the only one."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode(mode=True)

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Adapters hold their own caches; layers of one index do not collide."""
