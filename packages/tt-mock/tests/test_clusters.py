"""The clusters are such as can be built."""

from collections import Counter

import pytest
from tt_mock import CLUSTERS, Cluster

CHIPS = {"n150": 1, "n300": 2, "t3k": 8, "galaxy": 32, "galaxy_torus": 32, "p150": 1}
CABLES = {"n300": 1, "t3k": 10, "galaxy": 7 * 4 + 8 * 3, "galaxy_torus": 8 * 4 + 8 * 4}
each_cluster = pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)


def chips(cluster: Cluster) -> list[int]:
    return [chip for board in cluster.boards for chip in board]


def test_these_are_described() -> None:
    assert {name: len(chips(cluster)) for name, cluster in CLUSTERS.items()} == CHIPS


@each_cluster
def test_a_channel_has_one_cable_at_most(cluster: Cluster) -> None:
    ends = Counter(end for a, p, b, q in cluster.links for end in ((a, p), (b, q)))
    assert set(ends.values()) <= {1}
    assert {chip for chip, _ in ends} <= set(chips(cluster))


@pytest.mark.parametrize(("name", "cables"), CABLES.items())
def test_chips_are_connected(name: str, cables: int) -> None:
    cluster = CLUSTERS[name]
    pairs = Counter(frozenset((a, b)) for a, _, b, _ in cluster.links)
    assert len(pairs) == cables
    assert set(pairs.values()) == {4 if cluster.kind == "ubb" else 2}
    reached = {0}
    for _ in chips(cluster):
        reached |= {chip for pair in pairs if pair & reached for chip in pair}
    assert reached == set(chips(cluster))


@each_cluster
def test_the_description_names_every_chip(cluster: Cluster) -> None:
    lines = dict(line.split(": ", 1) for line in cluster.described().splitlines() if line)
    for name in ("arch", "chip_unique_ids", "harvesting", "chip_to_boardtype"):
        assert all(f"{{{chip}: " in lines[name] or f", {chip}: " in lines[name] for chip in chips(cluster))
    assert lines["chips_with_mmio"].count(":") == len(cluster.on_bus)
    assert lines["ethernet_connections"].count("chan") == 2 * len(cluster.links)
