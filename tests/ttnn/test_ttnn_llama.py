"""The Llama bundle in ttnn, by the real ttnn on mock clusters. `ttnn_llama_checks.py` has the checks."""

from typing import Any

import pytest

from .calls import ROOT
from .checks import names_in
from .conftest import Watched

LINES = {"n150": (1, "DISABLED"), "t3k": (8, "FABRIC_1D")}
ENGINE = {
    "MESH_DEVICE": "N150",
    "EXTRA_MODELS_DIR": str(ROOT / "examples/models/ttnn-llama"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def outcomes(mock: Watched, cluster: str) -> dict[str, str]:
    """How each check failed, or nothing."""
    told: dict[str, str] = mock.run(cluster, "ttnn_llama_checks.on_a_line", *LINES[cluster])
    return told


def served(mock: Watched) -> Any:
    return mock.run("n150", "ttnn_llama_engine.served", **ENGINE)


@pytest.mark.parametrize("check", names_in("ttnn_llama_checks.py"))
@pytest.mark.parametrize("cluster", LINES)
def test_on_mock_clusters(cluster: str, check: str, mock: Watched) -> None:
    failure = outcomes(mock, cluster)[check]
    assert not failure, failure


def test_the_engine_serves_it(mock: Watched) -> None:
    """Greedy text as by the torch bundle, sampled on the device and on the host, each by its own trace."""
    logits, sampled = 0, 1
    assert served(mock)["on device"]["texts"] == served(mock)["expected"]
    assert served(mock)["on host"]["texts"] == served(mock)["expected"]
    assert set(served(mock)["on device"]["executed"]) == {sampled}
    assert set(served(mock)["on host"]["executed"]) == {logits}
    assert served(mock)["traces"] == 2


def test_the_engine_finds_prefixes(mock: Watched) -> None:
    assert served(mock)["on device"]["cached"] == 0
    # Whole blocks of 64, of all but the last token: of prompts of 129 and 70 tokens.
    assert served(mock)["on host"]["cached"] == 128 + 64


def test_nothing_is_compiled_once_traces_are_captured(mock: Watched) -> None:
    assert served(mock)["compiled"] == 0
