"""Everything that is refused at start-up, found at once, and what is switched off with a reason instead."""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs
from tt_registry import Capabilities

from vllm_tt_plugin import mesh_ttnn
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.data_parallel import VISIBLE, Visible, device_groups, rank_problems
from vllm_tt_plugin.errors import ConfigurationError, Problem
from vllm_tt_plugin.lanes import lane_problems, lanes_of, rows_per_lane
from vllm_tt_plugin.mesh import MeshSpec, fabric_problems
from vllm_tt_plugin.served_model import ServedModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.tt_plugin")


def problems_of(
    config: "VllmConfig", served: ServedModel | None, mesh_shape: tuple[int, int] | None
) -> Iterator[Problem]:
    """Yield what cannot be served in this configuration.

    ``served`` is None where the model itself could not be resolved, ``mesh_shape`` where no mesh can be
    opened; the rest is checked all the same.
    """
    yield from _parallel_problems(config)
    yield from _feature_problems(config)
    if served is not None:
        for refusal in served.capabilities.refusals():
            yield Problem(refusal.rstrip("."), "Serve an adapter that returns one token a step")
    if served is not None and mesh_shape is not None and lanes_of(config) > 1:
        yield from lane_problems(lanes_of(config), served.entry.whole_mesh.lanes, mesh_shape)


def _parallel_problems(config: "VllmConfig") -> Iterator[Problem]:
    parallel = config.parallel_config
    for flag, size in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            yield Problem(
                f"{flag} is {size}",
                "Leave it at 1 and choose the mesh with MESH_DEVICE: the model's own program spreads over it",
            )
    if parallel.data_parallel_size > 1:
        yield from rank_problems(config)
    if parallel.nnodes > 1 or parallel.data_parallel_backend == "ray":
        yield Problem(
            f"the launch spans several hosts (nnodes {parallel.nnodes},"
            f" data parallel backend {parallel.data_parallel_backend})",
            "Serve the mesh of one host",
        )
    if parallel.distributed_executor_backend not in (None, "uni", "mp"):
        yield Problem(
            f"--distributed-executor-backend is {parallel.distributed_executor_backend!r}",
            "Leave it unset: one worker drives the mesh",
        )


def _feature_problems(config: "VllmConfig") -> Iterator[Problem]:
    if config.speculative_config is not None:
        yield Problem("speculative decoding is asked for", "Remove --speculative-config")
    if config.lora_config is not None:
        yield Problem(
            "LoRA is asked for", "Remove --enable-lora and serve a checkpoint with the adapter merged in"
        )
    if config.kv_transfer_config is not None or config.ec_transfer_config is not None:
        yield Problem(
            "a KV or encoder-cache connector is asked for",
            "Remove --kv-transfer-config and --ec-transfer-config",
        )
    model = config.model_config
    if model.runner_type != "generate":
        yield Problem(
            f"{model.model} is to run as a {model.runner_type} model", "Serve a model that generates text"
        )
    if model.is_encoder_decoder:
        yield Problem(f"{model.model} is an encoder-decoder model", "Serve a decoder-only model")
    if model.enable_prompt_embeds:
        yield Problem(
            "prompt embeddings are asked for", "Remove --enable-prompt-embeds and send tokens or text"
        )
    if model.multimodal_config is not None and model.multimodal_config.enable_mm_embeds:
        yield Problem("embeddings of images are asked for", "Remove --enable-mm-embeds and send images")
    if config.use_v2_model_runner and model.logits_processors:
        yield Problem(
            "custom logits processors are given while VLLM_USE_V2_MODEL_RUNNER asks for the V2 wire form",
            "Unset VLLM_USE_V2_MODEL_RUNNER",
        )


def switch_off_undeclared(config: "VllmConfig", settings: TTConfig, capabilities: Capabilities) -> None:
    """Turn off what the model or ``settings`` do not allow, each with a line that says why.

    An explicit limit is never lowered: where prompts cannot be cut into chunks, the token budget of a step is
    raised to the longest prompt.
    """
    if config.cache_config.enable_prefix_caching and not capabilities.supports_prefix_caching:
        logger.info("Prefix caching is off: the model does not declare supports_prefix_caching.")
        config.cache_config.enable_prefix_caching = False
    scheduler = config.scheduler_config
    if not capabilities.hybrid_kv_cache_groups:
        # One group for all layers then: vLLM keeps whole sequences of sliding windows too, and says so.
        scheduler.disable_hybrid_kv_cache_manager = True
    reason = _no_overlap(config, settings, capabilities)
    if reason is not None and scheduler.async_scheduling is not False:
        logger.info("Async scheduling is off: %s.", reason)
        scheduler.async_scheduling = False
    if scheduler.enable_chunked_prefill and not capabilities.supports_chunked_prefill:
        logger.info("Chunked prefill is off: the model does not declare supports_chunked_prefill.")
        scheduler.enable_chunked_prefill = False
    longest = config.model_config.max_model_len
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < longest:
        logger.info(
            "max_num_batched_tokens is raised from %d to %d: without chunked prefill a whole prompt"
            " (max_model_len) must fit one step.",
            scheduler.max_num_batched_tokens,
            longest,
        )
        scheduler.max_num_batched_tokens = longest
    if scheduler.max_num_batched_tokens < rows_per_lane(config):
        logger.info(
            "max_num_batched_tokens is raised from %d to %d: a decode step computes one token for each of"
            " max_num_seqs requests.",
            scheduler.max_num_batched_tokens,
            rows_per_lane(config),
        )
        scheduler.max_num_batched_tokens = rows_per_lane(config)


def _no_overlap(config: "VllmConfig", settings: TTConfig, capabilities: Capabilities) -> str | None:
    """Why the next decode cannot be submitted before the last one was read; None if it can."""
    if not capabilities.supports_async_decode:
        return "the model does not declare supports_async_decode"
    if not settings.traces_decode:
        return "trace_mode is 'none', and only a traced decode keeps its tokens on the device"
    if settings.sample_on_device_mode is None or settings.always_compat_sampling:
        return "tokens are sampled on the host (see sample_on_device_mode), one step after the other"
    if not capabilities.supports_sample_on_device:
        return "the model does not declare supports_sample_on_device"
    if config.parallel_config.distributed_executor_backend not in (None, "uni"):
        return "the executor would read outputs on a thread of its own, and one thread drives the mesh"
    return None


@attrs.frozen
class MeshPlan:
    """The mesh that each rank would open, or why it cannot be opened."""

    shape: tuple[int, int] | None
    problems: tuple[Problem, ...] = ()
    device_groups: tuple[tuple[str, ...], ...] = ()
    """The devices of each rank; empty where there is one rank, or a host mesh for each."""


def mesh_of(environ: Mapping[str, str], settings: TTConfig, ranks: int = 1) -> MeshPlan:
    """What ``MESH_DEVICE`` asks for, checked against the chips that are visible."""
    try:
        spec = MeshSpec.parse(environ.get("MESH_DEVICE"))
    except ConfigurationError as error:
        return MeshPlan(None, error.problems)
    if spec.on_host:
        return MeshPlan(spec.shape)
    probe = mesh_ttnn.probe()
    problems = chip_problems(spec, probe)
    if probe.fabric_names:
        problems += fabric_problems(settings.fabric_config, probe.fabric_names)
    groups: tuple[tuple[str, ...], ...] = ()
    if ranks > 1 and not problems:
        visible = Visible.of(environ.get(VISIBLE), probe.devices, probe.chips)
        try:
            groups = device_groups(visible, ranks, spec.shape)
        except ConfigurationError as error:
            problems += error.problems
    shape = spec.shape or (1, probe.chips // ranks)
    return MeshPlan(None if problems else shape, tuple(problems), groups)


def chip_problems(spec: MeshSpec, probe: mesh_ttnn.Probe) -> list[Problem]:
    """Why the mesh of ``spec`` cannot be opened with the chips that were found."""
    if probe.failure is not None:
        return [
            Problem(
                f"ttnn is installed but cannot be used: {probe.failure}",
                "Mend the TT-Metal installation (its libraries and driver must match this ttnn), or set"
                " MESH_DEVICE=host to serve without devices",
            )
        ]
    if probe.chips == 0:
        return [
            Problem(
                "no Tenstorrent chip was found",
                "Check the cards, the driver and TT_VISIBLE_DEVICES, or set MESH_DEVICE=host to serve without"
                " devices",
            )
        ]
    if spec.shape is not None and spec.shape[0] * spec.shape[1] > probe.chips:
        return [
            Problem(
                f"MESH_DEVICE asks for {spec.shape[0]}x{spec.shape[1]} chips and {probe.chips} are visible",
                "Choose a smaller mesh, or check TT_VISIBLE_DEVICES",
            )
        ]
    return []
