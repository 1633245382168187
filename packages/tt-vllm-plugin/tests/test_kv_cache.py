from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tt_registry import Capabilities
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_tt_plugin.errors import ConfigurationError
from vllm_tt_plugin.kv_cache import (
    PageTables,
    adapter_specs,
    blocks_per_request,
    bytes_for,
    layer_caches,
    max_tokens,
    plain_specs,
)

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
    specs = plain_specs(config, devices)
    wanted = FullAttentionSpec(block_size=4, num_kv_heads=heads, head_size=4, dtype=torch.bfloat16)
    assert list(specs.values()) == 3 * [wanted]


def test_bytes_for_the_planner(make_config: MakeConfig) -> None:
    specs = plain_specs(make_config(), num_devices=1)
    assert list(specs) == [f"model.layers.{index}.self_attn.attn" for index in range(3)]
    page = 2 * 4 * 2 * 4 * 2  # keys and values, tokens, heads, head size, bytes
    assert {spec.page_size_bytes for spec in specs.values()} == {page}
    assert bytes_for(specs, 1000) == (250 + 1) * 3 * page
    assert bytes_for(specs, 1001) == (251 + 1) * 3 * page


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


def full(**changes: Any) -> FullAttentionSpec:
    plain: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**plain | changes)


def window(size: int = 6, **changes: Any) -> SlidingWindowSpec:
    plain: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return SlidingWindowSpec(sliding_window=size, **plain | changes)


def described(hybrid: bool = True, allocates: bool = True, **specs: KVCacheSpec) -> Any:
    """`adapter_specs` of a class that names its layers so, with `_` for a point."""
    named = {name.replace("_", "."): spec for name, spec in specs.items()} or None
    members: dict[str, Any] = {"get_kv_cache_spec": classmethod(lambda cls, config: named)}
    if allocates:
        members["allocate_kv_cache_per_layer"] = lambda self, per_layer_specs: None
    return adapter_specs(type("Described", (), members), Capabilities(hybrid_kv_cache_groups=hybrid), None)  # type: ignore[arg-type]


def test_an_adapter_may_describe_its_own_cache() -> None:
    assert adapter_specs(Silent, Capabilities(), None) is None  # type: ignore[arg-type]
    assert described() is None
    assert described(layers_0=full(), layers_1=window()) == {"layers.0": full(), "layers.1": window()}
    assert described(hybrid=False, allocates=False, layers_0=full(), layers_1=window()) is not None
    assert described(allocates=False, layers_0=full(), layers_1=full()) is not None


STATE = MambaSpec(block_size=4, shapes=((1,),), dtypes=(torch.float,))


@pytest.mark.parametrize(
    ("description", "problem"),
    [
        ({"layers_0": full(), "layers_1": STATE}, "MambaSpec"),
        ({"layers_0": full(), "layers_2": full()}, "names the layers layers.0, layers.2"),
        ({"layers_0": full(), "mtp": full()}, "names the layers layers.0, mtp"),
        ({"layers_0": full(), "model_layers_0": full()}, "names the layers"),
        ({"layers_0": full(), "layers_1": window(), "allocates": False}, "no allocate_kv_cache_per_layer"),
    ],
)
def test_descriptions_that_are_refused(description: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        described(**description)


def planned(
    make_config: MakeConfig, specs: Mapping[str, KVCacheSpec], layout: str = "LBHNC", hybrid: bool = True
) -> KVCacheConfig:
    """What vLLM plans for these layers, 50 blocks of it."""
    config = make_config(num_gpu_blocks_override=50)
    if hybrid:
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.kv_cache_layout = layout
    groups = get_kv_cache_groups(config, dict(specs))
    return get_kv_cache_config_from_groups(config, groups, available_memory=10**9)


ONE_TO_TWO = {f"model.layers.{i}.attn": window() if i % 3 else full() for i in range(12)}


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
def test_layers_that_overlay_each_other_share_a_buffer(make_config: MakeConfig, layout: str) -> None:
    """Of twelve layers, four have full attention: three groups of four, each over the same four buffers."""
    names = sorted(ONE_TO_TWO)  # layers.10 comes before layers.2 here, and after it below
    layers = layer_caches(planned(make_config, {name: ONE_TO_TWO[name] for name in names}, layout))
    assert {(layer.shape, layer.dtype) for layer in layers} == {((50, 2, 4, 8), torch.bfloat16)}
    groups = [layer.group for layer in layers]
    assert groups[::3] == 4 * groups[:1]
    assert sorted(set(groups)) == [0, 1, 2]
    assert groups[0] not in groups[1::3] + groups[2::3]
    held = sorted((layer.group, layer.tensor_index) for layer in layers)
    assert held == [(group, index) for group in range(3) for index in range(4)]
    tables = PageTables.of(layers, width=5)
    assert (tables.groups, tables.group_of_layer) == (3, tuple(groups))


def test_layers_of_one_kind_are_one_group_with_buffers_of_their_own(make_config: MakeConfig) -> None:
    layers = layer_caches(planned(make_config, {f"layers.{i}": full() for i in range(3)}))
    assert [(layer.tensor_index, layer.group) for layer in layers] == [(0, 0), (1, 0), (2, 0)]
    tables = PageTables.of(layers, width=5)
    assert (tables.groups, tables.group_of_layer) == (1, ())


def test_windows_of_a_model_without_groups_keep_whole_sequences(make_config: MakeConfig) -> None:
    config = planned(make_config, ONE_TO_TWO, hybrid=False)
    assert [type(group.kv_cache_spec) for group in config.kv_cache_groups] == [FullAttentionSpec]
    assert {layer.group for layer in layer_caches(config)} == {0}


def test_layers_of_other_heads_have_shapes_of_their_own(make_config: MakeConfig) -> None:
    """Half as many bytes a token: vLLM doubles the block, and a page of one covers that of the other."""
    specs = {"layers.0": full(), "layers.1": window(head_size=4)}
    one, other = layer_caches(planned(make_config, specs))
    assert (one.shape, other.shape) == ((50, 2, 4, 8), (50, 2, 8, 4))
    assert (one.tensor_index, other.tensor_index) == (0, 0)
    assert one.group != other.group


def test_pages_that_overlap_in_part_get_buffers_of_their_own(make_config: MakeConfig) -> None:
    specs = {"layers.0": full(), "layers.1": full(head_size=4), "layers.2": window(head_size=4)}
    layers = layer_caches(planned(make_config, specs, "BLHNC"))
    assert layers[0].group == layers[1].group != layers[2].group
    assert len({layer.tensor_index for layer in layers}) == 3


@pytest.mark.parametrize(("longest", "blocks", "width"), [(128, 1000, 32), (125, 1000, 32), (128, 20, 20)])
def test_the_width_of_page_tables(make_config: MakeConfig, longest: int, blocks: int, width: int) -> None:
    config = make_config(max_model_len=longest)
    group = KVCacheGroupSpec(["layers.0"], full())
    assert blocks_per_request(config, KVCacheConfig(blocks, [], [group])) == width


def test_a_window_alone_may_slide_over_more_blocks_than_there_are(make_config: MakeConfig) -> None:
    group = KVCacheGroupSpec(["layers.0"], window())
    assert blocks_per_request(make_config(), KVCacheConfig(20, [], [group])) == 32
