"""Ranks whose experts are on Tenstorrent devices, as TT traces: they come and go while others serve.

Each has a mock N150 of its own. ttnn makes every call for real but those of a trace, for which a stand-in
holds the rules, and torch computes what the devices would.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_ep import EagerRunner, Group, Launcher, Patience, Shape, run_rank
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_group import ENVIRONMENT, ToyGroup
from elastic_ep.testing.toy_ttnn import TtnnToyService
from elastic_ep.transport_nixl import NixlTransport
from tt_mock import MockClusters

SHAPE = Shape(layers=2, experts=6, slots=4, max_ranks=4)
SECONDS = 120.0


def build(config: ToyConfig, rank: int) -> TtnnToyService:
    """In a rank's process."""
    import ttnn
    from tt_mock import Traced
    from tt_mock.ttnn_shadows import Shadows

    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 1), trace_region_size=1 << 20)
    sys.modules["ttnn"] = Traced(Shadows(mesh))  # type: ignore[assignment]
    return TtnnToyService(config, rank, mesh)


@pytest.fixture
def launcher(tt_mock: MockClusters) -> Iterator[Launcher]:
    environment = {**tt_mock.environment("n150"), **ENVIRONMENT}
    launcher = Launcher(["elastic_ep.testing.toy_ttnn", "nixl._api"], environment)
    yield launcher
    launcher.close()


def test_ranks_with_devices_come_and_go_and_capture_once(launcher: Launcher, tmp_path: Path) -> None:
    """Every result equals the dense one, or its rank would end."""
    config = ToyConfig(SHAPE, tokens=4, hidden=8, pace=0.05, log=str(tmp_path))
    main = functools.partial(
        run_rank,
        build=functools.partial(build, config),
        make_transport=NixlTransport,
        make_runner=EagerRunner,
    )
    group = Group(launcher, SHAPE, config.fingerprint, main, Patience(lease=20.0))
    toy = ToyGroup(group, tmp_path)
    try:
        for ranks in ((0, 1), (0, 1, 2), (1, 2)):
            group.scale(ranks, SECONDS)
            toy.await_steps(3, SECONDS)
        assert group.exits == ((0, 0),)
    finally:
        group.close()
    assert toy.steps_lost() == 0
    for records in toy.records().values():
        assert {record["captures"] for record in records if record["kind"] == "Flipped"} == {1}
