"""What sampling 32 rows on the host costs: the plugin's host sampler beside vLLM's `Sampler`, in turn.

Both get the same float32 logits, of a vocabulary of 32000 and of 128256 tokens, and requests with 256 tokens
of prompt and 256 generated. *vLLM* is its `Sampler` as its CPU runner calls it: metadata kept between steps,
top-k without a sort, masks by its `apply_grammar_bitmask`. The argmax and noise kernels of vLLM's CPU build
are missing from a build without device code; it is the PyTorch path that is measured. A figure named ratio is
our time over vLLM's.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _engines import set_environment, write_model
from _form import Comparison, Figure, interleave, main

HERE = Path(__file__).resolve().parent
ROWS, PROMPT, OUTPUT = 32, 256, 256
VOCABULARIES = {"32k": 32_000, "128k": 128_256}
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "seeded_random": {"temperature": 0.8, "seed": 1},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "seeded_top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1},
    "penalties": {"temperature": 0.0, **PENALTIES},
    "penalties_top_p": {"temperature": 0.8, "top_p": 0.95, **PENALTIES},
    "logprobs_20": {"temperature": 0.0, "logprobs": 20},
    "grammar": {"temperature": 0.0},
}
PLAIN = ("greedy", "random", "seeded_random", "logprobs_20")
"""At most vLLM's time; the others, with masks or penalties, at most 0.7 of it."""


class Side:
    """One sampler over one batch; `step_ms` samples once."""

    def __init__(self, logits: Any, sample: Callable[[Any], Any]) -> None:
        self._logits = logits
        self._sample = sample

    def step_ms(self) -> float:
        logits = self._logits.clone()  # samplers may write to them
        start = time.perf_counter()
        self._sample(logits)
        return (time.perf_counter() - start) * 1e3


def requests_of(options: dict[str, Any], vocab: int) -> Any:
    """A full table of like requests."""
    import torch
    from vllm import SamplingParams
    from vllm_tt_plugin.requests import RequestState, RequestTable, needs_of

    draw = torch.Generator().manual_seed(1)
    table = RequestTable(ROWS)
    for row in range(ROWS):
        sampling = SamplingParams(max_tokens=1000, **options)
        tokens = torch.randint(vocab, (PROMPT + OUTPUT,), generator=draw).tolist()
        state = RequestState(f"r{row}", tokens[:PROMPT], sampling, needs_of(sampling), tokens[PROMPT:])
        state.row = row
        table.by_row.append(state)
    table.changes += 1
    return table


def masks_of(vocab: int) -> Any:
    """What JSON is like: half of the requests may choose among a few tokens, half among almost all."""
    import numpy as np
    from vllm.v1.core.sched.output import GrammarOutput

    words = np.full((ROWS, (vocab + 31) // 32), -1, np.int32)
    words[:, 100:110] = 0x49249249
    words[::2, :100] = words[::2, 110:] = 0
    return GrammarOutput([f"r{row}" for row in range(ROWS)], words)


def ours(config: Any, table: Any, grammar: Any) -> Callable[[Any], Any]:
    from vllm_tt_plugin.host_sampling import HostSampler

    sampler = HostSampler(config)
    return lambda logits: sampler.sample_decode(logits, table, grammar)


def vllms(table: Any, vocab: int, grammar: Any) -> Callable[[Any], Any]:
    import torch
    from tt_sampling import step_generator
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.ops import topk_topp_sampler as ops
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.structured_output.utils import apply_grammar_bitmask
    from vllm_tt_plugin.host_sampling import sampling_metadata

    kept = sampling_metadata(table.by_row, vocab, LogitsProcessors())
    fields = {name: getattr(kept, name) for name in SamplingMetadata.__dataclass_fields__}
    prompts = torch.tensor([state.prompt for state in table.by_row])
    metadata = SamplingMetadata(**fields | {"prompt_token_ids": prompts})

    def native(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        logits = ops.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
        return ops.random_sample(logits.softmax(dim=-1, dtype=torch.float32), generators), None

    sampler = Sampler()
    sampler.topk_topp_sampler.forward = native
    scheduled: Any = SimpleNamespace(scheduled_spec_decode_tokens={})
    batch: Any = SimpleNamespace(req_ids=[state.request_id for state in table.by_row])
    seeded = [(row, s.sampling.seed, s.known) for row, s in enumerate(table.by_row) if s.sampling.seed]

    def sample(logits: Any) -> Any:
        metadata.generators = {row: step_generator(seed, position) for row, seed, position in seeded}
        if grammar is not None:
            apply_grammar_bitmask(scheduled, grammar, batch, logits)
        return sampler(logits, metadata)

    return sample


def compare(kind: str, vocab: int, config: Any, rounds: int) -> Comparison:
    import torch

    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(7)) * 3
    grammar = masks_of(vocab) if kind == "grammar" else None
    table = requests_of(KINDS[kind], vocab)
    sides = Side(logits, ours(config, table, grammar)), Side(logits, vllms(table, vocab, grammar))
    for side in sides:
        side.step_ms()  # warm
    return interleave(sides[0].step_ms, sides[1].step_ms, rounds)


def config_of(vocab: int, folder: Path) -> Any:
    from vllm import EngineArgs

    return EngineArgs(
        model=str(write_model(folder, vocab)), skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=ROWS
    ).create_engine_config()


def measure(quick: bool) -> list[Figure]:
    set_environment(HERE / "bundles")
    import torch

    figures = []
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        for name, vocab in VOCABULARIES.items():
            with tempfile.TemporaryDirectory() as folder:
                config = config_of(vocab, Path(folder))
                for kind in KINDS:
                    comparison = compare(kind, vocab, config, 2 if quick else 9)
                    label, aim = f"{kind}_{name}", 1.0 if kind in PLAIN else 0.7
                    figures.append(Figure(f"{label}_ms", statistics.median(comparison.a)))
                    figures.append(comparison.figure(f"{label}_to_vllm_ratio", at_most=aim))
    return figures


if __name__ == "__main__":
    main(__file__, __doc__, measure)
