"""Images in prompts: tokens are those of transformers, in whatever chunks, resumed or found cached."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from tt_scheduler import Phase
from vllm import LLM, SamplingParams
from vllm_tt_plugin.plan import StepPlan

from .conftest import REFUSALS, Engines, EngineShelf, lanes_of
from .drive import Driver
from .references import Reference
from .turmoil import turmoil
from .watch import PlanWatch

BUNDLE = Path(__file__).parent / "bundles/paged-transformers"
ARCHITECTURE = "PagedQwen2VLForCausalLM"
SPECIAL = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VOCAB = {token: index for index, token in enumerate([*sorted(ByteLevel.alphabet()), *SPECIAL])}
START, END, PAD = (VOCAB[token] for token in SPECIAL[1:4])
PATCH = 4
NEW_TOKENS = 24
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 40}
"""Chunks, and too few blocks for all."""


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


GREEDY = greedy(NEW_TOKENS)
ON_DEVICE: dict[str, Any] = {"additional_config": {"tt": {"sample_on_device_mode": "all"}}}


@attrs.frozen
class Prompt:
    """Text in pieces, with an image between each two."""

    pieces: Sequence[str]
    sizes: Sequence[tuple[int, int]] = ()

    @property
    def tokens(self) -> list[int]:
        return [*_letters(self.pieces[0])] + [
            token for piece in self.pieces[1:] for token in (START, PAD, END, *_letters(piece))
        ]

    @property
    def images(self) -> list[Image.Image]:
        return [_picture(width, height) for width, height in self.sizes]


def _letters(text: str) -> list[int]:
    return [VOCAB[letter] for letter in text]


def _picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 1_000 + height).integers(0, 255, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


PROMPTS = [
    Prompt(["no"]),
    Prompt(["look", "what"], [(16, 24)]),
    Prompt(["", "begins"], [(48, 16)]),
    Prompt(["ends", ""], [(16, 16)]),
    Prompt(["a" * 17, "b", "c" * 9], [(32, 40), (24, 24)]),
    Prompt(["no" * 30]),
    Prompt(["x", "y", "z", "." * 20, "!"], [(8, 8), (40, 16), (8, 8), (16, 80)]),
    Prompt(["a" * 17, "b", "c" * 30], [(32, 40), (24, 24)]),
    Prompt(["look", "what"], [(16, 24)]),
    Prompt(["look", "what"], [(24, 16)]),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen 2 VL with two small layers, an image processor and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("vision")
    torch.manual_seed(0)
    text: Any = {
        "vocab_size": len(VOCAB),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
    }
    vision: Any = {
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": PATCH,
        "initializer_range": 0.5,
    }
    tokens: Any = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"architectures": [ARCHITECTURE]}))
    processor_of(largest=24).save_pretrained(folder)
    return folder


def processor_of(largest: int) -> Any:
    """Of images of up to ``largest`` tokens."""
    sizes = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": largest * (2 * PATCH) ** 2}
    tokenizer = Qwen2Tokenizer(vocab=VOCAB, merges=[], additional_special_tokens=SPECIAL[1:])
    images, videos = (
        kind(patch_size=PATCH, size=sizes) for kind in (Qwen2VLImageProcessor, Qwen2VLVideoProcessor)
    )
    return Qwen2VLProcessor(images, tokenizer, videos)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def engine_of(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    bundle = tmp_path_factory.mktemp("bundle")
    for module in ("paged.py", "vision.py"):
        (bundle / module).symlink_to(BUNDLE / module)
    metadata = {"arch": ARCHITECTURE, "main_class": "vision:PagedQwen2VL"}
    (bundle / "vllm_metadata.json").write_text(json.dumps(metadata))
    shelf = EngineShelf(bundle, [ARCHITECTURE.removesuffix("ForCausalLM")])

    def build(model: Path = checkpoint, **settings: Any) -> LLM:
        return shelf(model, **{"max_model_len": 192, "max_num_seqs": 6, "block_size": 8} | settings)

    yield build
    shelf.close()


@pytest.fixture
def large_images(checkpoint: Path, tmp_path: Path) -> Path:
    """The same model, with images of up to 200 tokens."""
    folder = tmp_path / "large"
    shutil.copytree(checkpoint, folder)
    processor_of(largest=200).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    loaded: Any = Qwen2VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    return Qwen2VLImageProcessor.from_pretrained(checkpoint)


def compare(model: Any, processor: Any, prompt: Prompt, tokens: list[int]) -> None:
    """Against transformers, which is given its own processing of the images."""
    ids, inputs = prompt.tokens, {}
    if prompt.sizes:
        inputs = dict(processor(images=prompt.images, return_tensors="pt"))
        counts = iter((inputs["image_grid_thw"].prod(-1) // 4).tolist())
        ids = [token for known in ids for token in ([PAD] * next(counts) if known == PAD else [known])]
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()  # vLLM hands them over so
        inputs["mm_token_type_ids"] = torch.tensor([[token == PAD for token in ids + tokens[:-1]]]).int()
    Reference.of(model, ids, tokens, **inputs).compare(tokens)


def check(driver: Driver, model: Any, processor: Any) -> None:
    """Every token that requests got, and that no block is held; they are known by their place in PROMPTS."""
    for index, tokens in driver.tokens.items():
        if tokens:
            compare(model, processor, PROMPTS[int(index)], tokens)
    for lane in lanes_of(driver.engine):
        pool = lane.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"


def run(driver: Driver, model: Any, processor: Any) -> None:
    driver.drain()
    assert {len(tokens) for tokens in driver.tokens.values()} == {NEW_TOKENS}
    check(driver, model, processor)


def add(driver: Driver, *indices: int) -> None:
    for index in indices:
        driver.add(str(index), PROMPTS[index].tokens, GREEDY, images=PROMPTS[index].images)


def cut_images(plans: Sequence[StepPlan]) -> list[str]:
    """Requests with a chunk that ends inside of an image."""
    places: dict[str, list[Any]] = {}
    found = []
    for plan in plans:
        cached = plan.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for data in plan.scheduled_new_reqs:
            starts[data.req_id] = data.num_computed_tokens
            places[data.req_id] = [feature.mm_position for feature in data.mm_features]
        for name, count in plan.num_scheduled_tokens.items():
            end = starts[name] + count
            found += [name for p in places[name] if p.offset < end < p.offset + p.length]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        {**SMALL, **ON_DEVICE},
        {"v2_wire_form": True, **SMALL, **ON_DEVICE},
        {"data_parallel_size": 2, "max_num_seqs": 5, **SMALL, **ON_DEVICE},
    ],
    ids=["host", "device", "device, V2", "two lanes"],
)
def test_greedy_tokens_are_those_of_transformers(
    settings: dict[str, Any],
    engine_of: Engines,
    model: Any,
    processor: Any,
    watch: Callable[[LLM], PlanWatch],
) -> None:
    engine = engine_of(**settings)
    watching = watch(engine)
    driver = Driver(engine)
    add(driver, *range(len(PROMPTS)))
    run(driver, model, processor)
    assert watching.preemptions
    assert cut_images(watching.plans) == []
    assert max(plan.total_num_scheduled_tokens for plan in watching.plans) > 24, "chunks of several requests"
    starts = [data.num_computed_tokens for plan in watching.plans for data in plan.scheduled_new_reqs]
    assert any(starts) == ("data_parallel_size" not in settings), "a hit, where requests share a cache"


@pytest.mark.parametrize("seed", range(3))
def test_aborts_and_preemptions_change_no_token(
    seed: int, engine_of: Engines, model: Any, processor: Any
) -> None:
    driver = Driver(engine_of(**SMALL, **ON_DEVICE))
    turmoil(driver, [partial(add, driver, index) for index in range(len(PROMPTS))], seed)
    check(driver, model, processor)


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_step_of_resumed_requests_alone_computes_their_images_again(
    v2: bool, engine_of: Engines, model: Any, processor: Any, watch: Callable[[LLM], PlanWatch]
) -> None:
    engine = engine_of(v2_wire_form=v2, **SMALL, **ON_DEVICE)
    driver, watching = Driver(engine), watch(engine)
    add(driver, 1, 3)
    driver.step(9)
    assert watching.phases[-2:] == [Phase.DECODE, Phase.DECODE]
    driver.reset_running()
    before = len(watching.plans)
    run(driver, model, processor)
    resumed = watching.plans[before]
    assert (resumed.phase, len(resumed.rows)) == (Phase.PREFILL, 2)
    assert not cut_images(watching.plans)


@pytest.mark.parametrize(
    ("prompt", "most", "chunks"),
    [
        # 18 tokens, an image of 20, three more, an image of 9, and ten
        (PROMPTS[4], 28, [18, 23, 19]),
        # 121 tokens, an image of 24, 102 more, an image of 24, and 41: 128 is a size of chunks
        (Prompt(["a" * 120, "b" * 100, "c" * 40], [(64, 24), (64, 24)]), 256, [121, 191]),
    ],
    ids=["no room for all", "no such size"],
)
def test_a_chunk_ends_before_an_image_or_behind_it(
    prompt: Prompt, most: int, chunks: list[int], engine_of: Engines, watch: Callable[[LLM], PlanWatch]
) -> None:
    engine = engine_of(max_num_batched_tokens=most, max_model_len=448)
    watching, driver = watch(engine), Driver(engine)
    driver.add("a", prompt.tokens, GREEDY, images=prompt.images)
    driver.drain()
    prefills = [plan for plan in watching.plans if plan.phase is Phase.PREFILL]
    assert [plan.total_num_scheduled_tokens for plan in prefills] == chunks


def test_a_video_is_refused(engine_of: Engines) -> None:
    engine = engine_of(**SMALL)
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    asked: Any = {"prompt_token_ids": [START, PAD, END], "multi_modal_data": {"video": frames}}
    with pytest.raises(REFUSALS, match=r"At most 0 video\(s\)"):
        engine.llm_engine.add_request("video", asked, GREEDY)


def test_a_prompt_of_text_with_an_image(engine_of: Engines) -> None:
    """Through vLLM's own rendering, with a tokenizer."""
    engine = engine_of(**SMALL)
    asked: Any = {
        "prompt": "a<|vision_start|><|image_pad|><|vision_end|>b",
        "multi_modal_data": {"image": _picture(16, 24)},
    }
    (output,) = engine.generate(asked, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [VOCAB["a"], START, *6 * [PAD], END, VOCAB["b"]]


def test_an_image_longer_than_the_room_that_a_target_leaves_is_not_put_off(
    large_images: Path, engine_of: Engines
) -> None:
    """Its 156 tokens fit no chunk of 128, and the target allows no longer one while another decodes."""
    engine = engine_of(
        large_images,
        max_num_batched_tokens=256,
        max_model_len=448,
        additional_config={"tt": {"phase_policy": "bounded_gap", "target_itl_ms": 1}},
    )
    driver = Driver(engine)
    driver.add("text", _letters("tell"), greedy(200))
    driver.step(4)
    prompt = Prompt(["look", "what"], [(96, 104)])
    driver.add("image", prompt.tokens, greedy(1), images=prompt.images)
    while "image" not in driver.finished:
        driver.step()
    assert "text" not in driver.finished
    driver.drain()
