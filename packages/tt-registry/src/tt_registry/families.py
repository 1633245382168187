"""The families that TT-Metal itself has adapters for, as data."""

from collections.abc import Mapping

import attrs

from tt_registry.capabilities import Capabilities
from tt_registry.entry import Entry, LaneRule, WholeMesh
from tt_registry.errors import SettingError
from tt_registry.sources import BuiltinSource

_TRANSFORMERS = "models.tt_transformers.tt.generator_vllm"
_GALAXY = "models.demos.llama3_70b_galaxy.tt.generator_vllm"
_GEMMA4 = "models.demos.gemma4.tt.generator_vllm:Gemma4ForCausalLM"
_GALAXY_MESH = WholeMesh(folds_dp_into_lanes=True, lanes=LaneRule.MULTIPLE_OF_SECOND_SIDE)


def _gemma4(architecture: str) -> Entry:
    return Entry(
        architecture,
        _GEMMA4,
        capability_defaults=Capabilities(supports_chunked_prefill=True),
        override_plain_name=True,
    )


FIXED = (
    Entry(
        "MllamaForConditionalGeneration",
        f"{_TRANSFORMERS}:MllamaForConditionalGeneration",
        unsupported_reason="vLLM 0.33 itself no longer knows the Mllama architecture",
    ),
    Entry("Qwen2ForCausalLM", f"{_TRANSFORMERS}:QwenForCausalLM"),
    Entry(
        "Qwen2_5_VLForConditionalGeneration",
        "models.demos.qwen25_vl.tt.generator_vllm:Qwen2_5_VLForConditionalGeneration",
    ),
    Entry(
        "Qwen3VLForConditionalGeneration",
        "models.demos.qwen3_vl.tt.generator_vllm:Qwen3VLForConditionalGeneration",
    ),
    Entry("MistralForCausalLM", f"{_TRANSFORMERS}:MistralForCausalLM"),
    Entry("Mistral3ForConditionalGeneration", f"{_TRANSFORMERS}:Mistral3ForConditionalGeneration"),
    Entry("Gemma3ForConditionalGeneration", f"{_TRANSFORMERS}:Gemma3ForConditionalGeneration"),
    _gemma4("Gemma4ForCausalLM"),
    _gemma4("Gemma4ForConditionalGeneration"),
    _gemma4("Gemma4UnifiedForConditionalGeneration"),
    Entry(
        "DeepseekV3ForCausalLM",
        "models.demos.deepseek_v3.tt.generator_vllm:DeepseekV3ForCausalLM",
        whole_mesh=WholeMesh(folds_dp_into_lanes=True, lanes=LaneRule.AS_MANY_AS_CHIPS),
    ),
    Entry(
        "GptOssForCausalLM",
        f"{_TRANSFORMERS}:GptOssForCausalLM",
        whole_mesh=WholeMesh(folds_dp_into_lanes=True),
    ),
)

# The first value of each variable is its default.
VARIANTS: Mapping[str, Mapping[str, Entry]] = {
    "TT_LLAMA_TEXT_VER": {
        "tt_transformers": Entry("LlamaForCausalLM", f"{_TRANSFORMERS}:LlamaForCausalLM"),
        "llama3_70b_galaxy": Entry(
            "LlamaForCausalLM", f"{_GALAXY}:LlamaForCausalLM", whole_mesh=_GALAXY_MESH
        ),
        "llama2_70b": Entry(
            "LlamaForCausalLM", "models.demos.t3000.llama2_70b.tt.generator_vllm:TtLlamaForCausalLM"
        ),
    },
    "TT_QWEN3_TEXT_VER": {
        "tt_transformers": Entry("Qwen3ForCausalLM", f"{_TRANSFORMERS}:QwenForCausalLM"),
        "qwen3_32b_galaxy": Entry("Qwen3ForCausalLM", f"{_GALAXY}:QwenForCausalLM", whole_mesh=_GALAXY_MESH),
    },
    "TT_QWEN35_TEXT_VER": {
        "qwen36_blackhole": Entry(
            "Qwen3_5ForConditionalGeneration",
            "models.demos.blackhole.qwen36.tt.qwen36_vllm:Qwen36ForCausalLM",
        ),
    },
}


def builtin_entries(environ: Mapping[str, str]) -> tuple[Entry, ...]:
    """All built-in families, in the variants that `environ` asks for; raises `SettingError` on others."""
    fixed = [attrs.evolve(entry, source=BuiltinSource()) for entry in FIXED]
    return (*fixed, *(_chosen(variable, environ) for variable in VARIANTS))


def _chosen(variable: str, environ: Mapping[str, str]) -> Entry:
    variants = VARIANTS[variable]
    value = environ.get(variable) or next(iter(variants))
    if value not in variants:
        raise SettingError(variable, value, f"one of {', '.join(variants)}")
    return attrs.evolve(variants[value], source=BuiltinSource(f"{variable}={value}"))
