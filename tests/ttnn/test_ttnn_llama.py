"""The Llama bundle in ttnn, by the real ttnn on mock clusters. `ttnn_llama_checks.py` has the checks."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from .mock_cluster import ROOT, environment

SCRIPT = Path(__file__).with_name("ttnn_llama_checks.py")
MESHES = {"n150": ("n150", "1", ""), "t3k": ("t3k", "8", "FABRIC_1D")}
CHECKS = [
    node.name
    for node in ast.walk(ast.parse(SCRIPT.read_text()))
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module", params=MESHES)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cluster, *arguments = MESHES[request.param]
    folder, checkpoint = tmp_path_factory.mktemp("ttnn"), tmp_path_factory.mktemp("llama")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ttnn.ttnn_llama_checks", *arguments, str(checkpoint)],
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
