"""One server for all tests of this folder that do not need their own."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from .serving import SERVE_SMOLLM2, Server, running

MAX_MODEL_LEN = 512
BLOCKS = MAX_MODEL_LEN // 16 + 1  # one request of full length fits, and the block that vLLM keeps to itself
OPTIONS = [
    *("--max-model-len", str(MAX_MODEL_LEN)),
    *("--num-gpu-blocks-override", str(BLOCKS)),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running([*SERVE_SMOLLM2, *OPTIONS], tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client
