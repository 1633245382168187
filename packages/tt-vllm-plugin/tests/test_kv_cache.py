from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_tt_plugin.errors import ConfigurationError
from vllm_tt_plugin.kv_cache import KVCacheShape, adapter_specs, blocks_per_request, max_tokens

from .conftest import MakeConfig, with_lanes


@pytest.mark.parametrize(
    ("total", "devices", "lanes", "heads"),
    [
        (8, 1, 1, 8),
        (8, 2, 1, 4),
        (8, 8, 1, 1),
        (8, 32, 1, 1),  # more devices than heads: one each, repeated
        (8, 32, 4, 1),
        (8, 8, 4, 4),  # two devices a lane
        (8, 4, 4, 8),
        (2, 8, 1, 1),
        (2, 8, 8, 2),
        (1, 4, 1, 1),
    ],
)
def test_heads_are_shared_out_in_a_lane(
    make_config: MakeConfig, total: int, devices: int, lanes: int, heads: int
) -> None:
    config = with_lanes(make_config(hf_overrides={"num_key_value_heads": total}), lanes)
    shape = KVCacheShape.of(config, devices)
    assert shape == KVCacheShape(heads, block_size=4, head_size=4, dtype=torch.bfloat16, num_layers=3)


def test_bytes_for_the_planner(make_config: MakeConfig) -> None:
    shape = KVCacheShape.of(make_config(), num_devices=1)
    specs = shape.specs()
    assert list(specs) == [f"model.layers.{index}.self_attn.attn" for index in range(3)]
    page = 2 * 4 * 2 * 4 * 2  # keys and values, tokens, heads, head size, bytes
    assert {spec.page_size_bytes for spec in specs.values()} == {page}
    assert shape.bytes_for(1000) == (250 + 1) * 3 * page
    assert shape.bytes_for(1001) == (251 + 1) * 3 * page


class Silent:
    pass


class Budget:
    tokens = 200

    @classmethod
    def get_max_tokens_all_users(
        cls,
        *,
        model_name: str,
        num_devices: int,
        tt_data_parallel: int,
        max_model_len: int,
        max_num_seqs: int,
    ) -> int:
        assert model_name
        assert (num_devices, max_model_len, max_num_seqs) == (8, 128, 8), "max_num_seqs is one lane's"
        assert tt_data_parallel in (1, 2)
        return cls.tokens


class TooSmall(Budget):
    tokens = 127


def test_the_token_budget_is_the_adapters_or_the_contracts(make_config: MakeConfig) -> None:
    config = make_config()
    assert max_tokens(Silent, config, 8) == 131_072
    assert max_tokens(Budget, config, 8) == 200
    assert max_tokens(Budget, with_lanes(config, 2), 8) == 200


def test_a_budget_below_the_longest_sequence_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigurationError, match="holds 127 tokens on this mesh, and max_model_len is 128"):
        max_tokens(TooSmall, make_config(), 8)
    assert max_tokens(TooSmall, make_config(num_gpu_blocks_override=99), 8) == 127


def describes(*specs: Any) -> type[Any]:
    named = {f"layers.{index}": spec for index, spec in enumerate(specs)} or None
    return type("Describes", (), {"get_kv_cache_spec": classmethod(lambda cls, config: named)})


def test_an_adapter_may_describe_its_own_cache(make_config: MakeConfig) -> None:
    config = make_config()
    one, other = (
        KVCacheShape.of(config, devices).specs()["model.layers.0.self_attn.attn"] for devices in (1, 2)
    )
    assert adapter_specs(Silent, config) is None
    assert adapter_specs(describes(), config) is None
    assert adapter_specs(describes(one, one), config) == {"layers.0": one, "layers.1": one}
    with pytest.raises(ConfigurationError, match="not all alike"):
        adapter_specs(describes(one, other), config)
    assert KVCacheShape.of_specs({"a": other, "b": other}).specs().popitem()[1] == other


@pytest.mark.parametrize(("longest", "blocks", "width"), [(128, 1000, 32), (125, 1000, 32), (128, 20, 20)])
def test_the_width_of_page_tables(make_config: MakeConfig, longest: int, blocks: int, width: int) -> None:
    config = make_config(max_model_len=longest)
    assert blocks_per_request(config, SimpleNamespace(num_blocks=blocks)) == width  # type: ignore[arg-type]
