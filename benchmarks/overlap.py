"""How busy the host keeps a device that decodes: throughput over what the device alone could give.

A device of 13.8 ms a decode (a 70B model on a Galaxy) and one of 37 ms, 32 requests that decode together.
Each way of serving is compared with the device's own limit, one decode after the other without a gap:

    async, sync          an engine in this process, with async scheduling and without, in 1 and 4 lanes
    bare                 vLLM's own engine, with a worker that waits as long and does nothing else
    http                 a server with async scheduling, and 32 clients that stream from it

Ratios are tokens a second over the device's limit, medians over rounds.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _engines import REQUESTS, TOKENS_IN, prompts, set_environment, write_model
from _form import Figure, main

HERE = Path(__file__).resolve().parent
TOKENS_OUT, VOCAB = 96, 49_152
LATENCIES_MS, LANES = (13.8, 37.0), (1, 4)
IN_PROCESS, OVER_HTTP, SYNC_OVER_BARE_MS = 0.98, 0.95, 1.0
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


class Engine:
    """An engine in this process whose device takes the latency that the environment names."""

    def __init__(self, model: Path, lanes: int, overlap: bool, bare: bool = False) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=REQUESTS // lanes,
            data_parallel_size=lanes,
            max_num_batched_tokens=REQUESTS * TOKENS_IN,
            enable_prefix_caching=False,
            async_scheduling=overlap,
            additional_config={"tt": {"sample_on_device_mode": "all"}},
        )
        config = arguments.create_engine_config()
        if bare:
            config.parallel_config.worker_cls = "_bare.WaitingWorker"
            config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.scheduler.Scheduler"
        self._front = LLMEngine.from_vllm_config(config)
        self._runs = 0

    def step_ms(self) -> float:
        """Milliseconds a decode step while all requests decode."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS_OUT, ignore_eos=True, detokenize=False)
        self._runs += 1
        for index, tokens in enumerate(prompts(VOCAB)):
            self._front.add_request(f"{self._runs}-{index}", TokensPrompt(prompt_token_ids=tokens), sampling)
        times = []
        while self._front.has_unfinished_requests():
            if self._front.step():
                times.append(time.perf_counter())
        # The first outputs belong to prefills, and the last decode has none to overlap with.
        decodes = times[2:-1]
        return (decodes[-1] - decodes[0]) / (len(decodes) - 1) * 1e3


def copy_tokenizer(folder: Path) -> None:
    """The server wants one: that of SmolLM2."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    from prepare_smollm2 import prepare

    prepared = prepare()
    for name in TOKENIZER:
        if (prepared / name).is_file():
            shutil.copy(prepared / name, folder / name)


@contextmanager
def serving(model: Path, latency_ms: float) -> Iterator[str]:
    """The address of a server on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"tt": {"sample_on_device_mode": "all"}}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "timed"),
        *("--max-model-len", "1024", "--max-num-seqs", str(REQUESTS), "--no-enable-prefix-caching"),
        *("--async-scheduling", "--additional-config", json.dumps(settings)),
        *("--uvicorn-log-level", "error"),
    ]
    environment = os.environ | {"TIMED_DEVICE_DECODE_MS": str(latency_ms)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    server = subprocess.Popen(command, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(server, address)
        yield address
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def wait_until_healthy(server: "subprocess.Popen[bytes]", address: str, limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server did not answer within {limit_s:.0f} s, exit status {server.poll()}")


async def streamed_ms(address: str) -> float:
    """Milliseconds a token, from the last first token of all streams to the first end of one."""
    import httpx

    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        streams = await asyncio.gather(*(_arrivals(client, prompt) for prompt in prompts(VOCAB)))
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    counts = [sum(start < moment <= end for moment in times) for times in streams]
    return (end - start) / statistics.mean(counts) * 1e3


async def _arrivals(client: Any, prompt: list[int]) -> list[float]:
    """When each token of one stream came."""
    body = {
        "model": "timed",
        "prompt": prompt,
        "max_tokens": 2 * TOKENS_OUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        return [time.perf_counter() async for line in answer.aiter_lines() if line.startswith("data: {")]


def measure(quick: bool) -> list[Figure]:
    set_environment(HERE / "timed_bundles")
    rounds = 1 if quick else 5
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), VOCAB)
        copy_tokenizer(model)
        for latency in LATENCIES_MS[: 1 if quick else None]:
            figures += in_process(model, latency, rounds, LANES[: 1 if quick else None])
            if not quick:
                figures += over_http(model, latency, rounds)
    return figures


def in_process(model: Path, latency: float, rounds: int, all_lanes: Sequence[int]) -> list[Figure]:
    os.environ["TIMED_DEVICE_DECODE_MS"] = str(latency)
    engines = {"bare": Engine(model, 1, overlap=False, bare=True)}
    for lanes in all_lanes:
        for overlap in (True, False):
            engines[f"{'async' if overlap else 'sync'}_{lanes}"] = Engine(model, lanes, overlap)
    seen: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            seen[name].append(engine.step_ms())
    steps = {name: statistics.median(times) for name, times in seen.items()}
    figures = [Figure(f"bare_{latency:g}_step_ms", steps["bare"])]
    for name, step in steps.items():
        if name != "bare":
            aim = IN_PROCESS if name.startswith("async") else None
            note = f"{latency / max(seen[name]):.3f} to {latency / min(seen[name]):.3f} in {rounds} rounds"
            figures.append(
                Figure(f"{name}_{latency:g}_of_limit_ratio", latency / step, at_least=aim, note=note)
            )
    for lanes in all_lanes:
        over = steps[f"sync_{lanes}"] - steps["bare"]
        figures.append(Figure(f"sync_{lanes}_{latency:g}_over_bare_ms", over, SYNC_OVER_BARE_MS))
    return figures


def over_http(model: Path, latency: float, rounds: int) -> list[Figure]:
    with serving(model, latency) as address:
        asyncio.run(streamed_ms(address))  # warm
        steps = [asyncio.run(streamed_ms(address)) for _ in range(rounds)]
    note = f"{latency / max(steps):.3f} to {latency / min(steps):.3f} in {rounds} rounds"
    ratio = latency / statistics.median(steps)
    return [Figure(f"http_{latency:g}_of_limit_ratio", ratio, at_least=OVER_HTTP, note=note)]


if __name__ == "__main__":
    main(__file__, __doc__, measure)
