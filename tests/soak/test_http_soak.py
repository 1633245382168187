"""Thousands of streams over HTTP, some left in the middle: no token lost or wrong, nothing kept after."""

import asyncio
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from oracle_text import continuation
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.serving.serving import BUNDLES, VLLM_SERVE, Server, environment, running

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "10000"))
CLIENTS, LEFT_EARLY, VOCAB, LONGEST = 24, 0.05, 61, 128
SETTLED = 0.3
"""The part of all requests after which memory must have come to rest."""
SHARED = [(5 * i + 2) % VOCAB for i in range(64)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle, with a word for each token."""
    folder = tmp_path_factory.mktemp("oracle")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words).save_pretrained(folder)
    LlamaConfig(
        architectures=["OracleForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        eos_token_id=None,
        bos_token_id=None,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["1 lane", "2 lanes"])
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    lanes = request.param
    options = [
        *("--data_parallel_size", str(lanes), "--max-num-seqs", str(16 // lanes), "--block-size", "4"),
        *("--max-model-len", str(LONGEST), "--num-gpu-blocks-override", str(100 // lanes)),
        *("--async-scheduling", "--api-server-count", "1", "--served-model-name", "oracle"),
        *("--uvicorn-log-level", "error"),
        *("--additional-config", json.dumps({"tt": {"sample_on_device_mode": "all"}})),
    ]
    environ = environment(EXTRA_MODELS_DIR=str(BUNDLES / "oracle"), MESH_DEVICE="host:1x2")
    command = [*VLLM_SERVE, str(model), *options]
    with running(command, tmp_path_factory.mktemp("server"), environ) as server:
        yield server


@attrs.define
class Tally:
    done: int = 0
    left: int = 0
    tokens: int = 0


def memory_mib(server: Server) -> float:
    """Resident memory of all processes of a server."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in server.members()]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def stream(client: httpx.AsyncClient, number: int, tally: Tally) -> None:
    """One request; its tokens are checked as far as it is read."""
    chance = random.Random(number)
    prompt = SHARED[: chance.randrange(40)] + [
        chance.randrange(VOCAB) for _ in range(chance.randrange(1, 12))
    ]
    count = chance.randrange(1, 40)
    leaves_after = chance.randrange(count) if chance.random() < LEFT_EARLY else None
    body: dict[str, Any] = {
        "model": "oracle",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    got: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            got += json.loads(line[6:])["choices"][0]["token_ids"] or []
            if leaves_after is not None and len(got) > leaves_after:
                break
    expected = continuation(prompt, count, VOCAB)
    if leaves_after is None:
        assert got == expected, number
        tally.done += 1
    else:
        assert got == expected[: len(got)], number
        tally.left += 1
    tally.tokens += len(got)


async def soak(server: Server, tally: Tally) -> list[float]:
    """All requests, so many at a time. Returns the memory from when it should have settled on."""
    numbers, memory = iter(range(REQUESTS)), list[float]()
    # No connection is used twice: a server may close an idle one just as the next request is sent on it.
    once = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=once) as client:

        async def work() -> None:
            for number in numbers:
                await stream(client, number, tally)
                if number >= REQUESTS * SETTLED and number % max(REQUESTS // 50, 1) == 0:
                    memory.append(memory_mib(server))

        await asyncio.gather(*(work() for _ in range(CLIENTS)))
    return memory


def test_no_token_is_lost_and_nothing_is_kept(server: Server) -> None:
    tally = Tally()
    memory = asyncio.run(soak(server, tally))
    print(f"{tally}, memory {memory[0]:.0f} to {memory[-1]:.0f} MiB")
    assert tally.done + tally.left == REQUESTS
    assert tally.left >= REQUESTS * LEFT_EARLY / 2
    # Allocators keep some of what they were given; a leak of a request would be seen in thousands.
    assert memory[-1] <= memory[0] * 1.03
    with server.client() as client:  # one more step, in which the last ones are told of
        client.completions.create(model="oracle", prompt=[1, 2], max_tokens=1)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("tt:lane_running") == 0
    assert server.metric("vllm:num_preemptions_total") > 0, "memory never ran short"
