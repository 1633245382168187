"""What a decode step costs on the host: the plugin beside bare vLLM, in one process, in turn.

32 requests of 128 tokens in and 128 out, on an adapter that computes nothing. *bare* is vLLM's own engine and
scheduler with a worker that returns fixed tokens. Ours: the adapter returns token ids, with vLLM's full
scheduling (*plain*) and with steady decodes scheduled directly (*direct*); or *logits*, which the plugin
samples on the host (greedily, 32000 tokens of vocabulary). All are synchronous.

    --lanes N    split our 32 rows into N lanes; bare stays one scheduler
"""

import gc
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _engines import REQUESTS, TOKENS_IN, prompts, set_environment, write_model
from _form import Comparison, Figure, interleave, main

HERE = Path(__file__).resolve().parent
TOKENS_OUT, VOCAB = 128, 32_000
VARIANTS = ("bare", "plain", "direct", "logits")
AIMS_MS = {1: {"plain": 0.1, "direct": 0.1}, 4: {"plain": 0.2}}
"""By lanes: how much a variant may cost over bare; direct is what a server does unless told otherwise."""
AIMS_RATIO = {1: {"direct": 0.65}, 4: {"direct": 0.75}}
PARTS = ("schedule", "execute_model", "sample_tokens", "update_from_output")


class Engine:
    """An engine core driven step by step."""

    def __init__(self, variant: str, model: Path, lanes: int = 1) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        settings: dict[str, object] = {"direct_decode": variant != "plain"}
        if variant != "logits":
            settings["sample_on_device_mode"] = "all"
        lanes = 1 if variant == "bare" else lanes
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=REQUESTS // lanes,
            data_parallel_size=lanes,
            max_num_batched_tokens=REQUESTS * TOKENS_IN,
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=True,
            additional_config={"tt": settings},
        )
        config = arguments.create_engine_config()
        if variant == "bare":
            config.parallel_config.worker_cls = "_bare.BareWorker"
            config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.scheduler.Scheduler"
        self._front = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        client: Any = self._front.engine_core  # in this process, so the core itself is at hand
        self.core = client.engine_core
        self._runs = 0

    def start_requests(self) -> None:
        """Add all requests and run the steps that prefill them."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS_OUT, ignore_eos=True, detokenize=False)
        self._runs += 1
        for index, tokens in enumerate(prompts(VOCAB)):
            self._front.add_request(f"{self._runs}-{index}", TokensPrompt(prompt_token_ids=tokens), sampling)
        while self._decoding() < REQUESTS:
            self.core.step_fn()

    def _decoding(self) -> int:
        """How many requests have got their first token and run."""
        lanes = getattr(self.core.scheduler, "lanes", [self.core.scheduler])
        return sum(request.num_output_tokens > 0 for lane in lanes for request in lane.running)

    def decode_step_ms(self) -> float:
        """Median milliseconds of the decode steps of one run."""
        self.start_requests()
        gc.collect()
        times = []
        while self._decoding() == REQUESTS:
            start = time.perf_counter()
            self.core.step_fn()
            times.append(time.perf_counter() - start)
        self.drain()
        return statistics.median(times) * 1e3

    def split_ms(self) -> dict[str, float]:
        """Median milliseconds of each part of a decode step, in a run of its own."""
        self.start_requests()
        with timed_parts(self.core) as parts:
            while self._decoding() == REQUESTS:
                self.core.step_fn()
        self.drain()
        return {name: statistics.median(times) * 1e3 if times else 0.0 for name, times in parts.items()}

    def drain(self) -> None:
        while self.core.scheduler.has_requests():
            self.core.step_fn()


@contextmanager
def timed_parts(core: Any) -> Iterator[dict[str, list[float]]]:
    """Time the calls that make up a step while the context lasts."""
    owners = {
        name: core.scheduler if name in ("schedule", "update_from_output") else core.model_executor
        for name in PARTS
    }
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    for name, owner in owners.items():
        setattr(owner, name, _timed(getattr(owner, name), parts[name]))
    try:
        yield parts
    finally:
        for name, owner in owners.items():
            delattr(owner, name)


def _timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - start)

    return timed


def argmax_ms() -> float:
    """What picking the largest of 32000 logits for 32 rows costs by itself."""
    import torch

    logits = torch.zeros(REQUESTS, VOCAB)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        logits.argmax(dim=-1)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def peak_mib(variant: str) -> float:
    """Peak resident memory of a process that runs one variant once."""
    command = [sys.executable, __file__, "--memory-of", variant]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(child.stdout.splitlines()[-1])


def measure(quick: bool, lanes: int = 1) -> list[Figure]:
    set_environment(HERE / "bundles")
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), VOCAB)
        engines = {variant: Engine(variant, model, lanes) for variant in VARIANTS}
        for engine in engines.values():
            engine.decode_step_ms()  # warm
        rounds = 3 if quick else 15
        ours = {
            variant: interleave(engines[variant].decode_step_ms, engines["bare"].decode_step_ms, rounds)
            for variant in VARIANTS[1:]
        }
        splits = {variant: engine.split_ms() for variant, engine in engines.items()}
    bare = [step for comparison in ours.values() for step in comparison.b]
    figures = [Figure("bare_step_ms", statistics.median(bare))]
    for variant, comparison in ours.items():
        step = statistics.median(comparison.a)
        sampled = variant == "logits"
        figures += [
            Figure(
                f"{variant}_step_ms",
                step,
                at_most=1.25 if sampled and lanes == 1 else None,
                note=f"argmax alone {argmax_ms():.3f} ms" if sampled else "",
            ),
            Figure(f"{variant}_over_bare_ms", _over(comparison), AIMS_MS.get(lanes, {}).get(variant)),
            comparison.figure(f"{variant}_to_bare_ratio", AIMS_RATIO.get(lanes, {}).get(variant)),
        ]
    for variant, split in splits.items():
        figures += [Figure(f"{variant}_{part}_ms", split[part]) for part in PARTS]
    if not quick and lanes == 1:
        peaks = {variant: peak_mib(variant) for variant in ("bare", "direct", "logits")}
        figures.append(Figure("bare_peak_mib", peaks["bare"]))
        figures += [
            Figure(f"{variant}_over_bare_mib", peaks[variant] - peaks["bare"], at_most=60)
            for variant in ("direct", "logits")
        ]
    return figures


def take_lanes(arguments: list[str]) -> int:
    """Take `--lanes N` out of the arguments, which the common form does not know."""
    if "--lanes" not in arguments:
        return 1
    index = arguments.index("--lanes")
    lanes = int(arguments[index + 1])
    del arguments[index : index + 2]
    return lanes


def _over(comparison: Comparison) -> float:
    """Median over rounds of what a costs more than b."""
    return statistics.median(a - b for a, b in zip(comparison.a, comparison.b, strict=True))


def report_memory(variant: str) -> None:
    set_environment(HERE / "bundles")
    with tempfile.TemporaryDirectory() as folder:
        Engine(variant, write_model(Path(folder), VOCAB)).decode_step_ms()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory-of"]:
        report_memory(sys.argv[2])
    else:
        lanes = take_lanes(sys.argv)
        name = __file__ if lanes == 1 else __file__.replace(".py", f"_{lanes}_lanes.py")
        main(name, __doc__, lambda quick: measure(quick, lanes))
