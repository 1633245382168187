"""Layers with full attention beside layers with sliding windows: tokens are those of transformers."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from .conftest import Engines, EngineShelf, core_of, lanes_of
from .drive import Driver
from .references import Reference
from .turmoil import turmoil
from .watch import PlanWatch

BUNDLE = Path(__file__).parent / "bundles/paged-transformers"
BLOCK, WINDOW, VOCAB = 8, 20, 97
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"] * 2
LENGTHS = (1, 7, 8, 19, 20, 21, 28, 40, 64, 90, 131, 150)
NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
PROMPTS = [[(37 * i + j * j + 3 * j) % VOCAB for j in range(length)] for i, length in enumerate(LENGTHS)]
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 90}
"""Too few blocks for what eight requests come to hold."""
ON_DEVICE: dict[str, Any] = {"additional_config": {"tt": {"sample_on_device_mode": "all"}}}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen 3 in which two of three layers see no further than WINDOW tokens."""
    folder = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        layer_types=LAYERS,
        use_sliding_window=True,
        sliding_window=WINDOW,
        initializer_range=0.5,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


@pytest.fixture(scope="module")
def engine_of(windowed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    bundle = tmp_path_factory.mktemp("bundle")
    for module in ("paged.py", "windowed.py"):
        (bundle / module).symlink_to(BUNDLE / module)
    metadata = {"arch": "Qwen3ForCausalLM", "main_class": "windowed:WindowedQwen3"}
    (bundle / "vllm_metadata.json").write_text(json.dumps(metadata))
    shelf = EngineShelf(bundle)

    def build(**settings: Any) -> LLM:
        plain = {"max_model_len": 256, "max_num_seqs": 8, "block_size": BLOCK, "skip_tokenizer_init": True}
        return shelf(windowed, **plain | settings)

    yield build
    shelf.close()


@pytest.fixture(scope="module")
def model(windowed: Path) -> Any:
    loaded: Any = Qwen3ForCausalLM.from_pretrained(windowed, dtype=torch.float32)
    return loaded.eval()


def run(engine: LLM, prompts: list[list[int]], model: Any) -> None:
    """Serve all prompts at once and compare each token."""
    driver = Driver(engine)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, GREEDY)
    driver.drain()
    assert {len(tokens) for tokens in driver.tokens.values()} == {NEW_TOKENS}
    compare(driver, prompts, model)


def compare(driver: Driver, prompts: list[list[int]], model: Any) -> None:
    """Every token that requests got, and that no block is held any more."""
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens[str(index)]
        if tokens:
            Reference.of(model, prompt, tokens).compare(tokens)
    for lane in lanes_of(driver.engine):
        pool = lane.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"


def groups_of(engine: LLM) -> list[int]:
    """How many layers each KV cache group has."""
    groups = core_of(engine).scheduler.kv_cache_config.kv_cache_groups
    return [len(group.layer_names) for group in groups]


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"disable_hybrid_kv_cache_manager": True, "num_gpu_blocks_override": 40}, [6]),
        ({"max_num_batched_tokens": 24, **SMALL}, [2, 2, 2]),
        ({"max_num_batched_tokens": 24, **SMALL, **ON_DEVICE}, [2, 2, 2]),
        ({"data_parallel_size": 2, "max_num_batched_tokens": 24, **SMALL, **ON_DEVICE}, [2, 2, 2]),
    ],
    ids=["one group", "host, chunks", "device, chunks, V2", "two lanes"],
)
def test_greedy_tokens_are_those_of_transformers(
    settings: dict[str, Any],
    groups: list[int],
    engine_of: Engines,
    model: Any,
    watch: Callable[[LLM], PlanWatch],
    request: pytest.FixtureRequest,
) -> None:
    engine = engine_of(v2_wire_form="V2" in request.node.name, **settings)
    watching = watch(engine)
    run(engine, PROMPTS, model)
    assert groups_of(engine) == groups
    assert watching.preemptions


@pytest.mark.parametrize("seed", range(3))
def test_aborts_and_preemptions_change_no_token(seed: int, engine_of: Engines, model: Any) -> None:
    driver = Driver(engine_of(v2_wire_form=True, max_num_batched_tokens=24, **SMALL, **ON_DEVICE))
    prompts = PROMPTS + [prompt[: len(prompt) // 2 + 1] for prompt in PROMPTS]
    arrivals = [partial(driver.add, str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    turmoil(driver, arrivals, seed)
    compare(driver, prompts, model)


def test_prefix_hits_at_every_boundary(
    engine_of: Engines, model: Any, watch: Callable[[LLM], PlanWatch]
) -> None:
    """A hit needs all blocks of the layers with full attention, and those in the window of the others."""
    engine = engine_of(max_num_batched_tokens=40, prefix_cache_retention_interval=BLOCK, **ON_DEVICE)
    shared = PROMPTS[-1]
    run(engine, [shared], model)
    watching = watch(engine)
    places = [*range(BLOCK - 1, BLOCK + 2), *range(WINDOW - 1, WINDOW + 5), 47, 48, 49, 128, 149]
    run(engine, [[*shared[:place], place % VOCAB] for place in places], model)
    new = [data for plan in watching.plans for data in plan.scheduled_new_reqs]
    hits = {len(data.prompt_token_ids or []) - 1: data.num_computed_tokens for data in new}
    assert hits == {place: place // BLOCK * BLOCK for place in places}
