"""Data parallelism in processes: who gets which devices, and what is refused."""

import pytest
from vllm_tt_plugin import mesh_ttnn
from vllm_tt_plugin.checks import mesh_of, problems_of
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.data_parallel import Visible, bind_devices, device_groups, keep_groups
from vllm_tt_plugin.errors import ConfigurationError
from vllm_tt_plugin.mesh import MESH_SHAPES
from vllm_tt_plugin.mesh_ttnn import Probe
from vllm_tt_plugin.platform import TTPlatform

from .conftest import MakeConfig

N300 = Visible(("0",), 2)
T3K = Visible(("0", "1", "2", "3"), 8)
P150X4 = Visible(("0", "1", "2", "3"), 4)
GALAXY = Visible(tuple(map(str, range(32))), 32)


@pytest.mark.parametrize(
    ("setting", "devices", "chips", "visible"),
    [
        (None, 4, 8, T3K),
        ("", 4, 8, T3K),
        ("2,3", 2, 4, Visible(("2", "3"), 4)),
        (" 5 , 7", 2, 2, Visible(("5", "7"), 2)),
        ("0000:01:00.0", 1, 2, Visible(("0000:01:00.0",), 2)),
    ],
)
def test_what_is_visible(setting: str | None, devices: int, chips: int, visible: Visible) -> None:
    assert Visible.of(setting, devices, chips) == visible


@pytest.mark.parametrize(
    ("visible", "ranks", "mesh", "groups"),
    [
        (T3K, 4, "N300", (("0",), ("1",), ("2",), ("3",))),
        (T3K, 2, "N150x4", (("0", "1"), ("2", "3"))),
        (T3K, 2, None, (("0", "1"), ("2", "3"))),
        (T3K, 2, "N300", (("0",), ("1",))),
        (Visible(("3", "1"), 4), 2, "N300", (("3",), ("1",))),
        (P150X4, 4, "P150", (("0",), ("1",), ("2",), ("3",))),
        (P150X4, 2, "P150x2", (("0", "1"), ("2", "3"))),
        (P150X4, 3, None, (("0",), ("1",), ("2",))),
        (GALAXY, 4, "T3K", tuple(tuple(map(str, range(first, first + 8))) for first in (0, 8, 16, 24))),
    ],
)
def test_groups(visible: Visible, ranks: int, mesh: str | None, groups: tuple[tuple[str, ...], ...]) -> None:
    assert device_groups(visible, ranks, MESH_SHAPES[mesh] if mesh else None) == groups


@pytest.mark.parametrize("mesh", [*MESH_SHAPES, None])
@pytest.mark.parametrize("visible", [N300, T3K, P150X4, GALAXY])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 32])
def test_groups_share_nothing_and_are_large_enough(visible: Visible, ranks: int, mesh: str | None) -> None:
    shape = MESH_SHAPES[mesh] if mesh else None
    chips = shape[0] * shape[1] if shape else visible.chips // ranks
    try:
        groups = device_groups(visible, ranks, shape)
    except ConfigurationError:
        assert chips == 0 or ranks * chips > visible.chips or chips % visible.chips_of_each
        return
    dealt = [device for group in groups for device in group]
    assert len(groups) == ranks
    assert len(set(dealt)) == len(dealt)
    assert set(dealt) <= set(visible.devices)
    assert all(len(group) * visible.chips_of_each == chips for group in groups)


@pytest.mark.parametrize(
    ("visible", "ranks", "mesh", "says"),
    [
        (T3K, 2, "T3K", "needs 16 chips, 8 for each rank, and 8 are visible"),
        (T3K, 16, None, "needs 16 chips, 1 for each rank"),
        (T3K, 8, "N150", "each of 0, 1, 2, 3 has 2"),
        (GALAXY, 2, "TG", "needs 64 chips"),
    ],
)
def test_refusals(visible: Visible, ranks: int, mesh: str | None, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        device_groups(visible, ranks, MESH_SHAPES[mesh] if mesh else None)
    assert "MESH_DEVICE" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("mesh", "shape", "groups"),
    [("N300", (1, 2), (("4",), ("5",))), ("", (1, 4), (("4", "5"), ("6", "7"))), ("host:2x2", (2, 2), ())],
)
def test_the_plan_of_a_server(
    monkeypatch: pytest.MonkeyPatch,
    mesh: str,
    shape: tuple[int, int],
    groups: tuple[tuple[str, ...], ...],
) -> None:
    monkeypatch.setattr(mesh_ttnn, "probe", lambda: Probe(chips=8, devices=4, cluster="T3K"))
    environ = {"MESH_DEVICE": mesh, "TT_VISIBLE_DEVICES": "4,5,6,7"}
    plan = mesh_of(environ, TTConfig(), ranks=2)
    assert (plan.shape, plan.device_groups, plan.problems) == (shape, groups, ())
    too_many = mesh_of(environ | {"MESH_DEVICE": "T3K"}, TTConfig(), ranks=2)
    assert too_many.shape is None
    assert "needs 16 chips" in too_many.problems[0].found


def test_each_worker_sees_the_devices_of_its_rank_alone(make_config: MakeConfig) -> None:
    config = make_config()
    environ = {"TT_VISIBLE_DEVICES": "0,1,2,3"}
    keep_groups(config, ())
    bind_devices(config, environ)
    assert environ == {"TT_VISIBLE_DEVICES": "0,1,2,3"}
    keep_groups(config, device_groups(T3K, 2, None))
    for rank, devices in ((0, "0,1"), (1, "2,3"), (1, "2,3")):
        config.parallel_config.data_parallel_index = rank
        bind_devices(config, environ)
        assert environ == {"TT_VISIBLE_DEVICES": devices}


def test_a_dense_model_may_have_ranks(make_config: MakeConfig) -> None:
    config = make_config(data_parallel_size=2)
    parallel = config.parallel_config
    assert (parallel.data_parallel_size, parallel.distributed_executor_backend) == (2, "uni")
    TTPlatform.check_and_update_config(config)


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"data_parallel_external_lb": True}, "started one by one", "--data-parallel-rank"),
        ({"data_parallel_hybrid_lb": True}, "started one by one", "TT_VISIBLE_DEVICES"),
        ({"data_parallel_size_local": 1}, "of which 1 run on this host", "one host"),
    ],
)
def test_ranks_that_are_refused(
    make_config: MakeConfig, changes: dict[str, int], found: str, fix: str
) -> None:
    config = make_config()
    config.parallel_config.data_parallel_size = config.parallel_config.data_parallel_size_local = 2
    for name, value in changes.items():
        setattr(config.parallel_config, name, value)
    (problem,) = problems_of(config, None, None)
    assert found in problem.found
    assert fix in problem.fix


def test_a_mixture_of_experts_is_refused_with_the_way_out(make_config: MakeConfig) -> None:
    config = make_config()
    config.parallel_config.data_parallel_size = config.parallel_config.data_parallel_size_local = 2
    config.model_config.model_arch_config.num_experts = 8
    (problem,) = problems_of(config, None, None)
    assert "mixture of experts" in problem.found
    assert "folds_dp_into_lanes" in problem.fix
    assert "TT_VISIBLE_DEVICES" in problem.fix
