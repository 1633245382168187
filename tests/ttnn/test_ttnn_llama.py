"""The Llama bundle in ttnn, by the real ttnn on mock clusters. `ttnn_llama_checks.py` has the checks."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .mock_cluster import ROOT, environment

SCRIPT = Path(__file__).with_name("ttnn_llama_checks.py")
BUNDLE = ROOT / "examples/models/ttnn-llama"
MESHES = {"n150": ("n150", "1", ""), "t3k": ("t3k", "8", "FABRIC_1D")}
CHECKS = [
    node.name
    for node in ast.walk(ast.parse(SCRIPT.read_text()))
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


def told_by(module: str, arguments: list[str], env: dict[str, str]) -> Any:
    """What a module prints as JSON, last of all, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, f"ended with {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=MESHES)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cluster, *arguments = MESHES[request.param]
    folder, checkpoint = tmp_path_factory.mktemp("ttnn"), tmp_path_factory.mktemp("llama")
    arguments.append(str(checkpoint))
    told: dict[str, str] = told_by("tests.ttnn.ttnn_llama_checks", arguments, environment(cluster, folder))
    return told


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, checkpoint = tmp_path_factory.mktemp("ttnn"), tmp_path_factory.mktemp("llama")
    engine = {"MESH_DEVICE": "N150", "EXTRA_MODELS_DIR": str(BUNDLE), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env = environment("n150", folder) | engine
    told: dict[str, Any] = told_by("tests.ttnn.ttnn_llama_engine", [str(checkpoint)], env)
    return told


@pytest.mark.parametrize("check", CHECKS)
def test_on_mock_clusters(check: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[check], outcomes[check]


def test_the_engine_serves_it(served: dict[str, Any]) -> None:
    """Greedy text as by the torch bundle, sampled on the device and on the host, each by its own trace."""
    logits, sampled = 0, 1
    assert served["on device"]["texts"] == served["expected"]
    assert served["on host"]["texts"] == served["expected"]
    assert set(served["on device"]["executed"]) == {sampled}
    assert set(served["on host"]["executed"]) == {logits}
    assert served["traces"] == 2


def test_the_engine_finds_prefixes(served: dict[str, Any]) -> None:
    assert served["on device"]["cached"] == 0
    # Whole blocks of 64, of all but the last token: of prompts of 129 and 70 tokens.
    assert served["on host"]["cached"] == 128 + 64


def test_nothing_is_compiled_once_traces_are_captured(served: dict[str, Any]) -> None:
    assert served["compiled"] == 0
