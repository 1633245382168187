"""Meshes that the plugin opens and closes through the real ttnn, on every mock cluster."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from vllm_tt_plugin.data_parallel import VISIBLE, Visible, device_groups

from .conftest import Watched

SHAPES = {"N150": (1, 1), "N300": (1, 2), "N150x4": (1, 4), "T3K": (1, 8), "TG": (8, 4)}
"""A product for each shape that products have."""
CHIPS = {"n150": 1, "n300": 2, "t3k": 8, "galaxy": 32, "galaxy_torus": 32, "p150": 1}


@attrs.frozen
class Case:
    """One mesh to open, and what is to come of it: its shape and fabric, or words of a refusal."""

    mesh: str
    shape: tuple[int, int] | None
    fabric: str = "DISABLED"
    says: str = ""
    settings: dict[str, Any] = attrs.field(factory=dict, kw_only=True)
    model: dict[str, str] = attrs.field(factory=dict, kw_only=True)

    def __str__(self) -> str:
        return " ".join([self.mesh or "unset", *map(str, self.settings.values()), *self.model.values()])


def products(chips: int, fabric: str) -> list[Case]:
    """Every product where ``chips`` are visible: those that fit get ``fabric``, the others are refused."""
    return [
        Case(name, (rows, columns), fabric if rows * columns > 1 else "DISABLED")
        if rows * columns <= chips
        else Case(name, None, says=f"{rows}x{columns} needs {rows * columns} chips, and {chips} are visible")
        for name, (rows, columns) in SHAPES.items()
    ]


WRONG = Case("", None, says="Expected one of DISABLED, FABRIC_1D", settings={"fabric_config": "FABRIC_3D"})
CHOSEN = {
    "fabric_reliability_mode": "RELAXED_INIT",
    "trace_region_size": 10_000_000,
    "worker_l1_size": 1_000_000,
    "l1_small_size": 24_576,
}
CASES = {
    "n150": [*products(1, ""), Case("", (1, 1)), WRONG],
    "n300": [
        *products(2, "FABRIC_1D"),
        Case("", (1, 2), "FABRIC_1D"),
        Case("(2,1)", (2, 1), "FABRIC_1D"),
        WRONG,
        Case("N300", (1, 2), "FABRIC_1D"),
        Case("N300", (1, 2), "FABRIC_1D", settings=CHOSEN),
        Case("N300", (1, 2), "FABRIC_1D", settings={"trace_region_size": 0}),
    ],
    "t3k": [
        *products(8, "FABRIC_1D"),
        Case("", (1, 8), "FABRIC_1D"),
        Case("(2,4)", (2, 4), "FABRIC_1D"),
        Case("(4,2)", (4, 2), "FABRIC_1D"),
        Case("T3K", (1, 8), "FABRIC_1D_RING", settings={"fabric_config": "FABRIC_1D_RING"}),
        Case("(2,4)", (2, 4), "FABRIC_2D", model={"config": "FABRIC_2D"}),
        Case(
            "T3K", (1, 8), "FABRIC_1D", settings={"fabric_config": "FABRIC_1D"}, model={"config": "FABRIC_2D"}
        ),
        Case("N150", (1, 1), "FABRIC_1D", model={"config": "FABRIC_1D"}),
        Case("T3K", (1, 8), settings={"fabric_config": "DISABLED"}),
        Case("(3,3)", None, says="3x3 needs 9 chips"),
    ],
    "galaxy": [
        # The ends of its rows and columns do not meet, so with rings a mesh of 8 by 4 has no place.
        Case("TG", None, says="fabric config FabricConfig.FABRIC_1D_RING): Requested mesh is too big"),
        Case("TG", (8, 4), "FABRIC_1D", settings={"fabric_config": "FABRIC_1D"}),
    ],
    "galaxy_torus": [*products(32, "FABRIC_1D_RING"), Case("(2,16)", None, says="Requested mesh is too big")],
    "p150": [
        *products(1, ""),
        Case("", (1, 1), settings={"dispatch_core_axis": "col"}),
        Case("", None, says="ROW dispatch core axis is not", settings={"dispatch_core_axis": "row"}),
    ],
}


def outcomes(mock: Watched, cluster: str) -> list[tuple[Case, dict[str, Any]]]:
    """The cases of one cluster, and what came of each; all in one process, so that none leaves a trace."""
    cases = CASES[cluster]
    asked = [[case.mesh, case.settings, case.model] for case in cases]
    return list(zip(cases, mock.run(cluster, "mesh_checks.opened_all", asked), strict=True))


def of_a_rank(mock: Watched) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """The devices that the second of two ranks is dealt, and what came of its own mesh and of a whole one."""
    _, group = device_groups(Visible.of(None, devices=4, chips=8), 2, SHAPES["N150x4"])
    asked = [["N150x4", {}, {}], ["T3K", {}, {}]]
    return group, mock.run("t3k", "mesh_checks.opened_all", asked, **{VISIBLE: ",".join(group)})


@pytest.fixture(params=CASES)
def opened(request: pytest.FixtureRequest, mock: Watched) -> list[tuple[Case, dict[str, Any]]]:
    return outcomes(mock, request.param)


def test_meshes_open_as_asked_for(opened: list[tuple[Case, dict[str, Any]]]) -> None:
    for case, outcome in opened:
        if case.shape is not None:
            expected = {"shape": list(case.shape), "shape in ttnn": list(case.shape), "fabric": case.fabric}
            assert {name: outcome.get(name) for name in expected} == expected, (str(case), outcome)


def test_everything_is_given_back(opened: list[tuple[Case, dict[str, Any]]]) -> None:
    for case, outcome in opened:
        assert outcome["fabric after"] == "DISABLED", str(case)
        if case.shape is not None:
            chips = case.shape[0] * case.shape[1]
            assert outcome["submeshes"] == (chips if chips > 1 else 0)
            assert outcome["closed"] == 1 + outcome["submeshes"], str(case)


def test_what_cannot_be_opened_is_refused_in_words(opened: list[tuple[Case, dict[str, Any]]]) -> None:
    refused = [(case, outcome) for case, outcome in opened if case.shape is None]
    assert refused
    for case, outcome in refused:
        assert case.says in outcome.get("says", ""), (str(case), outcome)
        assert "backtrace" not in outcome["says"]
        assert outcome["refused"] == ("ConfigurationError" if case is WRONG else "MeshError")


def test_reliability_and_regions_reach_the_device(mock: Watched) -> None:
    *_, (_, default), (_, set_by_user), (_, without_traces) = outcomes(mock, "n300")
    assert default["fabrics"] == [{"config": "FABRIC_1D"}, {"config": "DISABLED"}]
    opening, closing = set_by_user["fabrics"]
    assert opening == {"config": "FABRIC_1D", "reliability_mode": "RELAXED_INIT"}
    assert closing == {"config": "DISABLED"}
    # ttnn rounds regions up to whole pages in each bank of memory.
    assert 50_000_000 <= default["bytes"]["TRACE"] < 51_000_000
    assert 10_000_000 <= set_by_user["bytes"]["TRACE"] < 11_000_000
    assert without_traces["bytes"]["TRACE"] == 0
    columns, rows = set_by_user["grid"]
    assert set_by_user["bytes"]["L1_SMALL"] == columns * rows * 24_576
    assert set_by_user["bytes"]["L1"] == columns * rows * (1_000_000 - 24_576)
    assert default["bytes"]["L1_SMALL"] == 0
    assert default["bytes"]["L1"] > set_by_user["bytes"]["L1"]


def test_the_doctor_tells_the_mesh_that_would_open(mock: Watched) -> None:
    visible = {"MESH_DEVICE": "(2,2)", "TT_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-m", "vllm_tt_plugin", "doctor", "--json"]
    env = mock.clusters.environment("t3k") | visible
    told = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False).stdout)
    # On a T3K a number in TT_VISIBLE_DEVICES is a board of two chips.
    probe = told["facts"]["probe"]
    assert (probe["devices"], probe["chips"], probe["cluster"]) == (2, 4, "N300_2x2")
    (mesh,) = [finding["found"] for finding in told["findings"] if finding["area"] == "mesh"]
    assert mesh.startswith("a 2x2 mesh; fabric FABRIC_1D, unless the model asks for another")


def test_a_rank_opens_its_mesh_on_the_devices_that_it_was_dealt(mock: Watched) -> None:
    group, (own, whole) = of_a_rank(mock)
    assert (group, own["shape"], own["fabric"]) == (("2", "3"), [1, 4], "FABRIC_1D")
    assert "needs 8 chips, and 4 are visible" in whole["says"]


def test_the_words_for_chips_of_another_process_are_those_of_the_driver() -> None:
    """Nobody can hold chips that are only described, so the plugin tests `taken` on these texts."""
    spec = importlib.util.find_spec("ttnn")
    assert spec is not None
    assert spec.origin is not None
    driver = Path(spec.origin).with_name("build").joinpath("lib/libtt-umd.so").read_bytes()
    for text in (
        b"Waiting for lock '{}' which is currently held by thread TID: {}, PID: {}",
        b"Waiting for KMD lock {} on {}, which is currently held by another handle",
        b"another process is already holding the sysmem NOC address space UMD requires (often",
    ):
        assert text in driver
