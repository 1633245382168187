import pytest
from tt_registry import BuiltinSource, LaneRule, Registry, SettingError, WholeMesh

GENERATOR = "models.tt_transformers.tt.generator_vllm"
GALAXY = "models.demos.llama3_70b_galaxy.tt.generator_vllm"
GEMMA4 = "models.demos.gemma4.tt.generator_vllm:Gemma4ForCausalLM"
PLAIN = WholeMesh()
BY_SECOND_SIDE = WholeMesh(True, LaneRule.MULTIPLE_OF_SECOND_SIDE)

TABLE = [
    ("LlamaForCausalLM", {}, f"{GENERATOR}:LlamaForCausalLM", PLAIN),
    (
        "LlamaForCausalLM",
        {"TT_LLAMA_TEXT_VER": "tt_transformers"},
        f"{GENERATOR}:LlamaForCausalLM",
        PLAIN,
    ),
    (
        "LlamaForCausalLM",
        {"TT_LLAMA_TEXT_VER": "llama3_70b_galaxy"},
        f"{GALAXY}:LlamaForCausalLM",
        BY_SECOND_SIDE,
    ),
    (
        "LlamaForCausalLM",
        {"TT_LLAMA_TEXT_VER": "llama2_70b"},
        "models.demos.t3000.llama2_70b.tt.generator_vllm:TtLlamaForCausalLM",
        PLAIN,
    ),
    ("MllamaForConditionalGeneration", {}, f"{GENERATOR}:MllamaForConditionalGeneration", PLAIN),
    ("Qwen2ForCausalLM", {}, f"{GENERATOR}:QwenForCausalLM", PLAIN),
    ("Qwen2ForCausalLM", {"TT_QWEN3_TEXT_VER": "qwen3_32b_galaxy"}, f"{GENERATOR}:QwenForCausalLM", PLAIN),
    ("Qwen3ForCausalLM", {}, f"{GENERATOR}:QwenForCausalLM", PLAIN),
    (
        "Qwen3ForCausalLM",
        {"TT_QWEN3_TEXT_VER": "qwen3_32b_galaxy"},
        f"{GALAXY}:QwenForCausalLM",
        BY_SECOND_SIDE,
    ),
    (
        "Qwen3_5ForConditionalGeneration",
        {},
        "models.demos.blackhole.qwen36.tt.qwen36_vllm:Qwen36ForCausalLM",
        PLAIN,
    ),
    (
        "Qwen3_5ForConditionalGeneration",
        {"TT_QWEN35_TEXT_VER": "qwen36_blackhole"},
        "models.demos.blackhole.qwen36.tt.qwen36_vllm:Qwen36ForCausalLM",
        PLAIN,
    ),
    (
        "Qwen2_5_VLForConditionalGeneration",
        {},
        "models.demos.qwen25_vl.tt.generator_vllm:Qwen2_5_VLForConditionalGeneration",
        PLAIN,
    ),
    (
        "Qwen3VLForConditionalGeneration",
        {},
        "models.demos.qwen3_vl.tt.generator_vllm:Qwen3VLForConditionalGeneration",
        PLAIN,
    ),
    ("MistralForCausalLM", {}, f"{GENERATOR}:MistralForCausalLM", PLAIN),
    ("Mistral3ForConditionalGeneration", {}, f"{GENERATOR}:Mistral3ForConditionalGeneration", PLAIN),
    ("Gemma3ForConditionalGeneration", {}, f"{GENERATOR}:Gemma3ForConditionalGeneration", PLAIN),
    ("Gemma4ForCausalLM", {}, GEMMA4, PLAIN),
    ("Gemma4ForConditionalGeneration", {}, GEMMA4, PLAIN),
    ("Gemma4UnifiedForConditionalGeneration", {}, GEMMA4, PLAIN),
    (
        "DeepseekV3ForCausalLM",
        {},
        "models.demos.deepseek_v3.tt.generator_vllm:DeepseekV3ForCausalLM",
        WholeMesh(True, LaneRule.AS_MANY_AS_CHIPS),
    ),
    ("GptOssForCausalLM", {}, f"{GENERATOR}:GptOssForCausalLM", WholeMesh(True)),
]


@pytest.mark.parametrize(("architecture", "environ", "target", "whole_mesh"), TABLE)
def test_family(architecture: str, environ: dict[str, str], target: str, whole_mesh: WholeMesh) -> None:
    registry = Registry.from_environ(environ, entry_points=False)
    entry = registry.resolve(architecture)
    assert (entry.target, entry.whole_mesh) == (target, whole_mesh)
    assert registry.resolve(f"TT{architecture}") is entry
    assert entry.registered_as == f"TT{architecture}"
    assert isinstance(entry.source, BuiltinSource)
    assert entry.override_plain_name is architecture.startswith("Gemma4")
    assert entry.capability_defaults.supports_chunked_prefill is architecture.startswith("Gemma4")
    assert (entry.unsupported_reason is not None) is architecture.startswith("Mllama")


def test_the_table_is_all_there_is() -> None:
    entries = Registry.from_environ({}, entry_points=False).entries
    assert set(entries) == {architecture for architecture, *_ in TABLE}


def test_the_source_names_the_choice() -> None:
    registry = Registry.from_environ({"TT_LLAMA_TEXT_VER": "llama2_70b"}, entry_points=False)
    assert str(registry.resolve("LlamaForCausalLM").source) == "built-in, TT_LLAMA_TEXT_VER=llama2_70b"
    assert str(registry.resolve("GptOssForCausalLM").source) == "built-in"


@pytest.mark.parametrize(
    ("variable", "choices"),
    [
        ("TT_LLAMA_TEXT_VER", ["tt_transformers", "llama3_70b_galaxy", "llama2_70b"]),
        ("TT_QWEN3_TEXT_VER", ["tt_transformers", "qwen3_32b_galaxy"]),
        ("TT_QWEN35_TEXT_VER", ["qwen36_blackhole"]),
        ("TT_VLLM_BUILTIN_MODELS", ["0", "1"]),
    ],
)
def test_an_unknown_value_names_the_choices(variable: str, choices: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        Registry.from_environ({variable: "llama4"}, entry_points=False)
    assert all(word in str(caught.value) for word in [variable, "llama4", *choices])


def test_empty_counts_as_unset() -> None:
    environ = dict.fromkeys(["TT_LLAMA_TEXT_VER", "TT_VLLM_BUILTIN_MODELS", "EXTRA_MODELS_DIR"], "")
    unset = Registry.from_environ({}, entry_points=False)
    assert Registry.from_environ(environ, entry_points=False).entries == unset.entries


@pytest.mark.parametrize(
    ("rule", "lanes", "mesh_shape", "allowed"),
    [
        (LaneRule.ANY, 3, (8, 4), True),
        (LaneRule.MULTIPLE_OF_SECOND_SIDE, 4, (8, 4), True),
        (LaneRule.MULTIPLE_OF_SECOND_SIDE, 8, (8, 4), True),
        (LaneRule.MULTIPLE_OF_SECOND_SIDE, 6, (8, 4), False),
        (LaneRule.AS_MANY_AS_CHIPS, 32, (8, 4), True),
        (LaneRule.AS_MANY_AS_CHIPS, 8, (8, 4), False),
    ],
)
def test_lane_rules(rule: LaneRule, lanes: int, mesh_shape: tuple[int, int], allowed: bool) -> None:
    assert rule.allows(lanes, mesh_shape) is allowed
