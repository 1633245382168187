"""The sampler through ttnn, by the real ttnn on mock clusters. `sampler_checks.py` says what is checked."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from .mock_cluster import ROOT, environment, ttnn_root

SCRIPT = Path(__file__).with_name("sampler_checks.py")
MESHES = {
    "n150": ("n150", "1", "1", ""),
    "t3k as a line": ("t3k", "1", "8", "FABRIC_1D_RING"),
    "t3k as a grid": ("t3k", "2", "4", "FABRIC_1D"),
}
CHECKS = [
    node.name
    for node in ast.walk(ast.parse(SCRIPT.read_text()))
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module", params=MESHES)
def outcomes(request: pytest.FixtureRequest, folder: Path) -> dict[str, str]:
    cluster, *arguments = MESHES[request.param]
    run = subprocess.run(
        [sys.executable, "-m", "tests.ttnn.sampler_checks", *arguments],
        cwd=ROOT,
        env=environment(cluster, folder),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, f"ended with {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    told: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("check", CHECKS)
def test_on_mock_clusters(check: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[check], outcomes[check]


def test_the_installed_ttnn_has_no_stand_in(folder: Path) -> None:
    """A real device must never meet it."""
    root = environment("n150", folder)["TT_METAL_RUNTIME_ROOT"]
    assert list(Path(root).rglob("riscv-tt-elf-g++"))
    assert not list(ttnn_root().rglob("riscv-tt-elf-g++"))
