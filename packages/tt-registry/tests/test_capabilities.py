from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_registry import Capabilities, CapabilityError

DEFAULTS = {
    "supports_prefix_caching": False,
    "supports_chunked_prefill": False,
    "supports_async_decode": False,
    "supports_sample_on_device": False,
    "supports_device_penalties": True,
    "supports_device_seeds": False,
    "max_device_top_k": None,
    "supports_device_grammar": False,
    "device_logprobs": "none",
    "fabric_config": None,
    "output_tokens_per_step": 1,
    "tt_adaptive_block_output": False,
    "supports_spec_decode": False,
    "spec_requirements": (),
    "spec_hidden_handoff": (),
    "supports_async_spec_decode": False,
    "folds_dp_into_lanes": False,
    "rows_must_be_packed": False,
    "decode_input_update_contract": 0,
    "hybrid_kv_cache_groups": False,
}
ATTRIBUTES = {
    "decode_input_update_contract": "decode_input_update_contract",
    "hybrid_kv_cache_groups": "_HYBRID_KV_CACHE_GROUPS_ENABLED",
}


def adapter(**attributes: Any) -> type:
    return type("Adapter", (), attributes)


def test_a_class_that_declares_nothing_gets_the_defaults() -> None:
    assert attrs.asdict(Capabilities.from_class(adapter())) == DEFAULTS
    assert attrs.asdict(Capabilities.from_class(adapter(model_capabilities=None))) == DEFAULTS


VALUES = {
    "max_device_top_k": st.none() | st.integers(1, 1000),
    "device_logprobs": st.sampled_from(["none", "sampled", "top32"]),
    "output_tokens_per_step": st.integers(1, 64),
    "decode_input_update_contract": st.sampled_from([0, 1]),
    "fabric_config": st.none() | st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
    "spec_requirements": st.lists(st.text(max_size=4), max_size=3).map(tuple),
    "spec_hidden_handoff": st.lists(st.text(max_size=4), max_size=3).map(tuple),
}
FITTING = {key: VALUES.get(key, st.booleans()) for key in DEFAULTS}
ANYTHING = st.sampled_from([None, True, 0, 1, 2, -1, 1.0, "x", (), [], {}, {1: 2}, {"a": 1}, b"", object()])


def declare(values: dict[str, Any]) -> type:
    own = {ATTRIBUTES[key]: value for key, value in values.items() if key in ATTRIBUTES}
    return adapter(model_capabilities={k: v for k, v in values.items() if k not in ATTRIBUTES}, **own)


@given(st.fixed_dictionaries({}, optional=FITTING), st.fixed_dictionaries({}, optional=FITTING))
def test_declared_over_known_over_default(declared: dict[str, Any], known: dict[str, Any]) -> None:
    capabilities = Capabilities.from_class(declare(declared), Capabilities(**known))
    assert attrs.asdict(capabilities) == {**DEFAULTS, **known, **declared}


@given(st.sampled_from(sorted(DEFAULTS)), ANYTHING)
def test_a_value_is_kept_or_refused_with_its_name(key: str, value: object) -> None:
    refusal = None
    try:
        kept = getattr(Capabilities.from_class(declare({key: value})), key)
    except CapabilityError as error:
        refusal = str(error)
    if refusal is None:
        assert kept in (value, tuple(value) if isinstance(value, list) else value)
        assert isinstance(value, bool) == isinstance(DEFAULTS[key], bool)
    else:
        assert all(word in refusal for word in ["Adapter", ATTRIBUTES.get(key, key), repr(value), "expected"])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("supports_async_decode", 1, "a bool"),
        ("supports_async_decode", None, "a bool"),
        ("max_device_top_k", True, "an int of at least 1, or None"),
        ("max_device_top_k", 0, "an int of at least 1, or None"),
        ("device_logprobs", "top20", "'none', 'sampled' or 'top32'"),
        ("output_tokens_per_step", 2.0, "an int of at least 1"),
        ("fabric_config", "FABRIC_1D", "a dict with str keys, or None"),
        ("spec_requirements", "hidden", "a tuple or list"),
        ("decode_input_update_contract", 2, "0 or 1"),
        ("decode_input_update_contract", True, "0 or 1"),
        ("hybrid_kv_cache_groups", "yes", "a bool"),
    ],
)
def test_wrong_types(key: str, value: object, expected: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        Capabilities.from_class(declare({key: value}))
    assert caught.value.expected == expected


def test_model_capabilities_must_be_a_dict() -> None:
    with pytest.raises(CapabilityError, match="model_capabilities"):
        Capabilities.from_class(adapter(model_capabilities=["supports_async_decode"]))


def test_unknown_keys_are_ignored_and_attributes_are_not_read_from_the_dict() -> None:
    declared = {"supports_telepathy": 7, "decode_input_update_contract": 9, "hybrid_kv_cache_groups": 9}
    assert Capabilities.from_class(adapter(model_capabilities=declared)) == Capabilities()


def test_a_subclass_inherits_and_the_record_is_a_copy() -> None:
    fabric = {"config": "FABRIC_1D"}
    parent = adapter(model_capabilities={"fabric_config": fabric}, decode_input_update_contract=1)
    capabilities = Capabilities.from_class(type("Child", (parent,), {}))
    fabric.clear()
    assert capabilities.fabric_config == {"config": "FABRIC_1D"}
    assert capabilities.decode_input_update_contract == 1
    assert hash(capabilities) == hash(Capabilities(decode_input_update_contract=1))


@pytest.mark.parametrize(
    ("declared", "word"),
    [
        ({"output_tokens_per_step": 4}, "block output"),
        ({"tt_adaptive_block_output": True}, "block output"),
        ({"supports_spec_decode": True}, "speculative"),
        ({"supports_async_spec_decode": True}, "speculative"),
    ],
)
def test_what_cannot_be_served_yet_is_said(declared: dict[str, Any], word: str) -> None:
    (reason,) = Capabilities.from_class(declare(declared)).refusals()
    assert word in reason
    assert Capabilities().refusals() == ()
