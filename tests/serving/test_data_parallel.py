"""Data parallelism in processes: a model that is not one program on the whole mesh, in two engines."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from .conftest import OPTIONS
from .serving import BUNDLES, SERVE_SMOLLM2, environment, running, tail
from .test_requests import PROMPTS, generate


def unfolded(folder: Path) -> Path:
    """The Llama of the examples, as one that does not say that it runs the whole mesh."""
    shutil.copytree(BUNDLES / "torch-llama", folder / "torch-llama")
    adapter = folder / "torch-llama" / "adapter.py"
    text = adapter.read_text()
    assert text.count('"folds_dp_into_lanes": True') == 1
    adapter.write_text(text.replace('"folds_dp_into_lanes": True', '"folds_dp_into_lanes": False'))
    return folder


@pytest.mark.timeout(1200)  # three processes, each of which imports all of vLLM
def test_two_engines_serve_as_one(tmp_path: Path, client: OpenAI) -> None:
    expected = [generate(client, prompt) for prompt in PROMPTS]
    environ = environment(MESH_DEVICE="host:1x2", EXTRA_MODELS_DIR=str(unfolded(tmp_path / "bundles")))
    command = [*SERVE_SMOLLM2, *OPTIONS, "--data-parallel-size", "2", "--api-server-count", "1"]
    with running(command, tmp_path, environ) as server:

        def through_its_own_connection(prompt: str) -> list[int]:
            with server.client() as other:
                return generate(other, prompt)

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(through_its_own_connection, PROMPTS)) == expected, tail(server.log)
        finished = re.findall(
            r'^vllm:request_success_total\{engine="(\d)".*finished_reason="length".*\} (\S+)$',
            server.get("/metrics"),
            re.MULTILINE,
        )
        served = {engine: float(count) for engine, count in finished}
        assert set(served) == {"0", "1"}, server.get("/metrics")
        assert min(served.values()) > 0, served
        assert sum(served.values()) == len(PROMPTS)
