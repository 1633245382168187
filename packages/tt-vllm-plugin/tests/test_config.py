from typing import Any

import attrs
import pytest
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import ConfigurationError

FLAG = ([True, False], ["true", 1, None])
COUNT_FROM_1 = ([1, 7], [0, -1, 1.5, "2", True, None])
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "sample_on_device_mode": (["all", "decode_only", None], ["ALL", "", True, ["all"]]),
    "always_compat_sampling": FLAG,
    "trace_mode": (["all", "decode_only", "none", None], [False, "prefill_only"]),
    "enable_model_warmup": FLAG,
    "trace_region_size": ([0, 10**9], [-1, 1e6, "50000000", None]),
    "worker_l1_size": ([1, 1_300_000], [0, "1"]),
    "l1_small_size": ([0, 24_576], [-1, False]),
    "fabric_config": (["FABRIC_1D", None], ["", 1]),
    "fabric_reliability_mode": (["STRICT_INIT", "RELAXED_INIT", None], ["strict_init"]),
    "dispatch_core_axis": (["row", "col", None], ["ROW", 0]),
    "optimizations": (["performance", "accuracy", None], ["speed"]),
    "register_test_models": FLAG,
    "phase_policy": (["prefill_first", "interleave", "bounded_gap", None], ["fair", True]),
    "target_itl_ms": COUNT_FROM_1,
    "direct_decode": FLAG,
    "decode_interleave_enabled": FLAG,
    "decode_interleave_prefill_steps": COUNT_FROM_1,
    "decode_interleave_decode_steps": COUNT_FROM_1,
}


def test_every_key_is_tried_here() -> None:
    assert set(VALUES) == set(attrs.fields_dict(TTConfig))


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, (good, _) in VALUES.items() for value in good]
)
def test_good_values(key: str, value: Any) -> None:
    assert getattr(TTConfig.parse({key: value}), key) == value


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, (_, bad) in VALUES.items() for value in bad]
)
def test_bad_values(key: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="Expected") as caught:
        TTConfig.parse({key: value})
    (problem,) = caught.value.problems
    assert problem.found == f"additional_config.tt.{key} is {value!r}"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("sample_on_device", "sample_on_device_mode"),
        ("trace_regionsize", "trace_region_size"),
        ("decode_interleave_steps", "decode_interleave_decode_steps"),
        ("Optimisations", "optimizations"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TTConfig.parse({key: 1})
    (problem,) = caught.value.problems
    assert problem.found == f"additional_config.tt has no key {key!r}"
    assert problem.fix == f"Did you mean {nearest!r}?"


def test_a_key_like_no_other_lists_them_all() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TTConfig.parse({"zzz": 1})
    assert all(key in caught.value.problems[0].fix for key in VALUES)


@pytest.mark.parametrize("key", ["rank_binding", "mpi_args"])
def test_multi_host_keys_are_refused_as_that(key: str) -> None:
    with pytest.raises(ConfigurationError, match="several hosts"):
        TTConfig.parse({key: "anything"})


def test_one_message_holds_every_problem() -> None:
    settings = {"trace_mod": "all", "mpi_args": "", "trace_region_size": "big", "optimizations": "speed"}
    with pytest.raises(ConfigurationError) as caught:
        TTConfig.parse(settings)
    message = str(caught.value)
    assert len(caught.value.problems) == 4
    assert [f"\n  {number}. " in message for number in range(1, 6)] == [True] * 4 + [False]
    assert all(
        word in message for word in ("trace_mode", "several hosts", "'big'", "'performance', 'accuracy'")
    )


@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    [(None, True, True), ("all", True, True), ("decode_only", False, True), ("none", False, False)],
)
def test_what_is_traced(mode: Any, prefill: bool, decode: bool) -> None:
    config = TTConfig(trace_mode=mode)
    assert (config.traces_prefill, config.traces_decode) == (prefill, decode)


@pytest.mark.parametrize("additional", [None, {}, {"tt": {}}, {"other": {"trace_mod": 1}}])
def test_without_settings_the_defaults_hold(additional: Any) -> None:
    config = TTConfig.from_additional_config(additional)
    assert config == TTConfig()
    assert (config.trace_region_size, config.sample_on_device_mode) == (50_000_000, None)
    interleave = (config.decode_interleave_prefill_steps, config.decode_interleave_decode_steps)
    assert (config.decode_interleave_enabled, *interleave) == (True, 2, 1)


@pytest.mark.parametrize("settings", ["trace_mode=all", None, ["trace_mode"]])
def test_settings_that_are_no_mapping(settings: Any) -> None:
    with pytest.raises(ConfigurationError, match="Expected a mapping of settings"):
        TTConfig.from_additional_config({"tt": settings})
