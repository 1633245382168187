"""vLLM's own scheduler and configuration, built small and without an engine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import EngineArgs, ModelRegistry, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs

ARCHITECTURE = "UpstreamForCausalLM"
BLOCK_SIZE = 4
CHECKPOINT = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
BUNDLE = """
class Adapter:
    model_capabilities = {"supports_chunked_prefill": True}
"""


class Inspected(torch.nn.Module):
    """What vLLM's inspection of a class looks for. Given as a class, it is looked at in this process."""

    def __init__(self, vllm_config: Any = None, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: Any) -> Any: ...

    def forward(self, input_ids: Any, positions: Any) -> Any: ...

    def compute_logits(self, hidden_states: Any) -> Any: ...


def write_checkpoint_and_bundle(folder: Path) -> tuple[Path, Path]:
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    checkpoint.mkdir()
    bundle.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(CHECKPOINT))
    (bundle / "adapter.py").write_text(BUNDLE)
    metadata = {"arch": ARCHITECTURE, "main_class": "adapter:Adapter"}
    (bundle / "vllm_metadata.json").write_text(json.dumps(metadata))
    return checkpoint, bundle


def make_config(checkpoint: Path, **options: Any) -> "VllmConfig":
    given = {"max_num_seqs": 4, "block_size": BLOCK_SIZE, "enable_prefix_caching": False, **options}
    arguments = EngineArgs(model=str(checkpoint), skip_tokenizer_init=True, **given)
    ModelRegistry.register_model(ARCHITECTURE, Inspected)
    return arguments.create_engine_config()


def make_scheduler(config: "VllmConfig", blocks: int = 100, kind: Any = Scheduler) -> Any:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    group = KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    config.cache_config.num_gpu_blocks = blocks
    return kind(config, cache, StructuredOutputManager(config), block_size=BLOCK_SIZE)


def make_request(name: str, prompt: int, max_tokens: int = 8, **sampling: Any) -> Request:
    """A request of `prompt` tokens that generates exactly `max_tokens`."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, **sampling)
    return Request(name, list(range(1, prompt + 1)), params, None)


def step(scheduler: Scheduler, token: int = 7) -> "tuple[SchedulerOutput, dict[int, EngineCoreOutputs]]":
    """Schedule, pretend that every request whose tokens are all computed sampled `token`, and update."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [token] for name in names]
    ran = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=sampled,
    )
    return output, scheduler.update_from_output(output, ran)
