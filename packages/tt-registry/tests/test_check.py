import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tt_registry import check_adapter, check_bundle
from tt_registry.contract import RELOAD_COMMANDS

MakeBundle = Callable[..., Path]


def class_of(source: str) -> type:
    names: dict[str, Any] = {}
    exec(source, names)
    adapter = names["Adapter"]
    assert isinstance(adapter, type)
    return adapter


def findings_of(source: str) -> list[str]:
    return [str(finding) for finding in check_adapter(class_of(source), known_to_vllm=False)]


def changed(source: str, old: str, new: str) -> str:
    assert old in source
    return source.replace(old, new)


def test_strict_keyword_only_signatures_fit(fitting_adapter: str) -> None:
    assert findings_of(fitting_adapter) == []


def test_open_signatures_fit(fitting_adapter: str) -> None:
    source = re.sub(r"\(\s*(self|cls), [^)]*\)", r"(\1, *args, **kwargs)", fitting_adapter)
    assert "tokens" not in source.replace("output_tokens", "")
    assert findings_of(source) == []


def test_a_bundle_that_fits(make_bundle: MakeBundle, fitting_adapter: str) -> None:
    before = list(sys.meta_path), set(sys.modules)
    report = check_bundle(make_bundle("new", {"adapter.py": fitting_adapter}))
    assert (list(sys.meta_path), set(sys.modules)) == before
    assert [entry.architecture for entry in report.entries] == ["NewForCausalLM"]
    assert report.findings == ()


METHODS = [
    "initialize_vllm_model",
    "allocate_kv_cache",
    "warmup_model_prefill",
    "warmup_model_decode",
    "prefill_forward",
    "decode_forward",
    "read_decode_output",
    "process_decode_output_host",
    "embed_input_ids",
    "forward",
    "compute_logits",
]


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_method(fitting_adapter: str, method: str) -> None:
    (finding,) = findings_of(changed(fitting_adapter, f"def {method}(", f"def not_{method}("))
    assert finding.startswith(f"{method}: is missing")


def test_the_output_pair_may_be_absent_together(fitting_adapter: str) -> None:
    source = changed(fitting_adapter, "def read_decode_output(", "def a(")
    assert findings_of(changed(source, "def process_decode_output_host(", "def b(")) == []


def test_allocation_per_layer_is_enough(fitting_adapter: str) -> None:
    per_layer = "allocate_kv_cache_per_layer(self, *, per_layer_specs)"
    whole = "allocate_kv_cache(self, *, shape, dtype, num_layers)"
    assert findings_of(changed(fitting_adapter, whole, per_layer)) == []


ALWAYS = [
    ("initialize_vllm_model", "hf_config, "),
    ("initialize_vllm_model", ", optimizations"),
    ("allocate_kv_cache", "shape, "),
    ("warmup_model_prefill", "enable_trace, "),
    ("warmup_model_decode", "num_blocks, "),
    ("prefill_forward", "empty_slots,"),
    ("prefill_forward", "prompt_lens, "),
    ("decode_forward", "read_from_device,"),
    ("decode_forward", "start_pos, "),
]


@pytest.mark.parametrize(("method", "argument"), ALWAYS)
def test_an_argument_that_is_not_accepted(fitting_adapter: str, method: str, argument: str) -> None:
    before, name, after = fitting_adapter.partition(f"def {method}(")
    (finding,) = findings_of(before + name + after.replace(argument, "", 1))
    assert finding.startswith(f"{method}: does not accept {argument.strip(', ')};")


@pytest.mark.parametrize("method", ["initialize_vllm_model", "prefill_forward", "decode_forward"])
def test_an_argument_that_nobody_sends(fitting_adapter: str, method: str) -> None:
    before, name, after = fitting_adapter.partition(f"def {method}(")
    (finding,) = findings_of(before + name + after.replace("*,", "*, weather,", 1))
    assert finding.startswith(f"{method}: demands weather, which is sent never")


def test_an_argument_that_is_sent_now_and_then_needs_a_default(fitting_adapter: str) -> None:
    source = changed(fitting_adapter, "prompt_tokens=None", "prompt_tokens")
    (finding,) = findings_of(source)
    assert "demands prompt_tokens, which is sent only in some calls" in finding


def test_a_positional_only_argument_is_not_accepted_by_keyword(fitting_adapter: str) -> None:
    source = changed(
        fitting_adapter, "*, kv_cache, enable_trace, can_sample", "kv_cache, /, enable_trace, can_sample"
    )
    (finding,) = findings_of(source)
    assert "does not accept kv_cache;" in finding


@pytest.mark.parametrize(
    "parameters",
    [
        "shape, dtype, num_layers",
        "kv_cache_shape, element_type, layers",
        "*args",
        "a, /, dtype, *, num_layers",
    ],
)
def test_leading_arguments_come_by_position_where_they_can(fitting_adapter: str, parameters: str) -> None:
    source = changed(fitting_adapter, "(self, *, shape, dtype, num_layers)", f"(self, {parameters})")
    assert findings_of(source) == []


def test_a_leading_argument_without_a_place(fitting_adapter: str) -> None:
    source = changed(fitting_adapter, "(self, *, shape, dtype, num_layers)", "(self, shape, dtype)")
    (finding,) = findings_of(source)
    assert finding == "allocate_kv_cache: does not accept num_layers; add it"


SAMPLING = "sampling_params=None, prompt_tokens=None, output_tokens=None, reset_batch=False,"
DECLARED = '{"supports_sample_on_device": True}'
CAPABILITY_ARGUMENTS = [
    (DECLARED, "", ["sampling_params", "reset_batch", "prompt_tokens", "output_tokens"]),
    (
        '{"supports_sample_on_device": True, "supports_device_penalties": False}',
        "",
        ["sampling_params", "reset_batch"],
    ),
    ("{}", "", []),
    ("{}", "decode_input_update_contract = 1", list(RELOAD_COMMANDS)),
    ("{}", "_HYBRID_KV_CACHE_GROUPS_ENABLED = True", ["page_tables_per_layer"]),
    ('{"rows_must_be_packed": True}', "", ["slot_remap"]),
    (
        DECLARED,
        "decode_input_update_contract = 1",
        [*RELOAD_COMMANDS, "sampling_params", "prompt_tokens", "output_tokens"],
    ),
]


@pytest.mark.parametrize(("declared", "attribute", "expected"), CAPABILITY_ARGUMENTS)
def test_arguments_of_a_capability_are_demanded_where_it_is_declared(
    fitting_adapter: str, declared: str, attribute: str, expected: list[str]
) -> None:
    source = changed(fitting_adapter, DECLARED, f"{declared}\n    {attribute}")
    findings = findings_of(changed(source, SAMPLING, ""))
    prefix = "decode_forward: does not accept "
    lacking = [f.removeprefix(prefix).partition(";")[0] for f in findings if f.startswith(prefix)]
    assert lacking == expected
    in_prefill = [f for f in findings if f.startswith("prefill_forward")]
    assert len(in_prefill) == ("page_tables_per_layer" in expected)


def test_version_1_rejects_a_required_reset_batch(fitting_adapter: str) -> None:
    source = changed(
        fitting_adapter,
        "    model_capabilities",
        "    decode_input_update_contract = 1\n    model_capabilities",
    )
    (finding,) = findings_of(
        changed(source, "reset_batch=False,", f"reset_batch, {', '.join(RELOAD_COMMANDS)},")
    )
    assert "demands reset_batch, which is sent never" in finding


def test_reload_commands_need_no_default(fitting_adapter: str) -> None:
    source = changed(
        fitting_adapter,
        "    model_capabilities",
        "    decode_input_update_contract = 1\n    model_capabilities",
    )
    assert (
        findings_of(
            changed(source, "reset_batch=False,", f"{', '.join(RELOAD_COMMANDS)},".replace(",,", ","))
        )
        == []
    )


def test_initialize_must_belong_to_the_class(fitting_adapter: str) -> None:
    (finding,) = findings_of(changed(fitting_adapter, "@classmethod", ""))
    assert "expected a classmethod" in finding
    assert findings_of(changed(fitting_adapter, "@classmethod", "@staticmethod").replace("cls, *", "*")) == []


def test_optional_class_methods_are_checked_where_present(fitting_adapter: str) -> None:
    extra = "    @classmethod\n    def get_kv_cache_spec(cls, config, model): ...\n"
    (finding,) = findings_of(fitting_adapter + extra)
    assert finding.startswith("get_kv_cache_spec: demands model")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("__init__(self, *, vllm_config)", "__init__(self, model)", "__init__: does not accept vllm_config="),
        (
            "forward(self, input_ids, positions)",
            "forward(self, ids, positions)",
            "forward: does not accept input_ids=",
        ),
    ],
)
def test_vllms_surface_is_demanded_of_bundles_alone(
    fitting_adapter: str, old: str, new: str, where: str
) -> None:
    source = changed(fitting_adapter, f"def {old}", f"def {new}")
    (finding,) = findings_of(source)
    assert finding.startswith(where)
    assert check_adapter(class_of(source)) == ()


def test_bad_capabilities_are_findings(fitting_adapter: str) -> None:
    (finding, *_) = findings_of(changed(fitting_adapter, DECLARED, '{"supports_async_decode": "yes"}'))
    assert "expected a bool" in finding
    (refused,) = findings_of(changed(fitting_adapter, DECLARED, '{"output_tokens_per_step": 8}'))
    assert "block output" in refused


@pytest.mark.parametrize(
    ("adapter", "main_class", "where", "word"),
    [
        ("class Adapter(: ...", "adapter:Adapter", "main_class", "SyntaxError"),
        ("import absent_module", "adapter:Adapter", "main_class", "No module named 'absent_module'"),
        ("class Other: ...", "adapter:Adapter", "main_class", "has no class Adapter"),
        ("Adapter = 3", "adapter:Adapter", "main_class", "has no class Adapter"),
        ("", "adaptor:Adapter", "metadata", "there is no adaptor.py"),
        ("", 3, "metadata", "expected module:Class"),
    ],
)
def test_a_bundle_that_cannot_be_loaded(
    make_bundle: MakeBundle, adapter: str, main_class: object, where: str, word: str
) -> None:
    (finding,) = check_bundle(make_bundle("new", {"adapter.py": adapter}, main_class=main_class)).findings
    assert finding.where == where
    assert word in finding.message


def test_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    (finding,) = check_bundle(tmp_path / "absent").findings
    assert str(finding) == "metadata: vllm_metadata.json cannot be read: No such file or directory"
