"""Two servers for all tests of this folder that do not need their own: of a real model, and of a tiny one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from openai import OpenAI
from prepare_smollm2 import prepare

from ..tiny_model import write_tiny
from .serving import MODEL, SERVE_SMOLLM2, VLLM_SERVE, Server, running

MAX_MODEL_LEN = 512
BLOCKS = MAX_MODEL_LEN // 16 + 1  # one request of full length fits, and the block that vLLM keeps to itself
LIMITS = ["--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", str(BLOCKS)]
OPTIONS = [*LIMITS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


@pytest.fixture(scope="session")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    """The server of this folder, which starts again only after a test ended it."""
    servers: list[Server] = []
    with ExitStack() as stack:

        def get() -> Server:
            if not servers or servers[-1].process.poll() is not None:
                place = tmp_path_factory.mktemp("server")
                servers.append(stack.enter_context(running([*SERVE_SMOLLM2, *OPTIONS], place)))
            return servers[-1]

        yield get


@pytest.fixture
def server(running_server: Callable[[], Server]) -> Server:
    return running_server()


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A random model of two small layers, for many requests; its vocabulary is a real one."""
    model = write_tiny(tmp_path_factory.mktemp("tiny"), prepare())
    options = ["--served-model-name", MODEL, *LIMITS, "--max-num-seqs", "32"]
    with running([*VLLM_SERVE, str(model), *options], tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client
