"""Greedy tokens of the engine are those of transformers, one by one, in float32.

`references.py` says where either of two tokens is right.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from vllm import LLM, SamplingParams

from .conftest import Engines
from .references import Reference
from .watch import PlanWatch

LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 129, 200, 256, 300)
NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
TEXT = """
The lighthouse keeper wrote a letter each evening, though no ship had called for a month. He told of the
wind, of 3 gulls that nested below the lamp, and of the price of oil: 42 shillings for a barrel! "What use
is a light," he asked, "if nobody sails?" In the morning he climbed 117 steps, wound the clockwork, and
wiped the salt from the glass. def area(r): return 3.14159 * r ** 2 # he was fond of sums. On Sundays he
read aloud from a book about volcanoes, islands and the first steam engines, until the fire went out. Then,
one night in November, a lantern answered from the sea: long, short, short, long. He counted twice, put on
his coat and went down to the boat, which had lain upside down since spring. The rope was stiff with frost;
the oars were where he had left them. Chapter 2. Zwei Fischer, un enfant et trois chiens were aboard, and
none of them spoke a word he knew. They ate bread and soup without a sound, they slept beside the stove, and
when the sun came up the dogs were gone. Item A: kettle, tin, 1.5 litres. Item B: two blankets (wool). Item
C: a compass that points south on Tuesdays. The keeper put them in a row, wrote down what each had cost, and
asked the eldest fisherman to sign.
"""

Build = Callable[[], LLM]


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    loaded: Any = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    """No two of them begin alike, or the prefix cache would save what is to be computed."""
    text = AutoTokenizer.from_pretrained(smollm2).encode(TEXT.strip())
    assert len(text) >= max(LENGTHS) + len(LENGTHS), "the text is too short for its prompts"
    return [text[index : index + length] for index, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def outputs_alone(prompts: list[list[int]], smollm2_engine: Engines) -> list[list[int]]:
    engine = smollm2_engine()
    return [run(engine, [prompt])[0] for prompt in prompts]


@pytest.fixture(scope="module")
def references(model: Any, prompts: list[list[int]], outputs_alone: list[list[int]]) -> list[Reference]:
    return [
        Reference.of(model, prompt, tokens) for prompt, tokens in zip(prompts, outputs_alone, strict=True)
    ]


@pytest.fixture
def agree(
    references: list[Reference], record_property: Callable[[str, object], None]
) -> Callable[[list[list[int]]], None]:
    def check(outputs: list[list[int]]) -> None:
        equal = [reference.compare(tokens) for reference, tokens in zip(references, outputs, strict=True)]
        record_property("narrow places", equal.count(False))
        print(f"{equal.count(True)} of {len(equal)} are equal, {equal.count(False)} part at a narrow place")

    return check


def run(engine: LLM, prompts: list[list[int]]) -> list[list[int]]:
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(asked, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_there_are_enough_prompts(prompts: list[list[int]]) -> None:
    lengths = [len(prompt) for prompt in prompts]
    assert len(lengths) >= 20
    assert (min(lengths), max(lengths)) == (1, 300)


def test_references_are_what_transformers_generates(model: Any, references: list[Reference]) -> None:
    """Of three lengths, as one batch, which is padded on the left."""
    chosen = [reference for reference in references if len(reference.prompt) in (1, 33, 300)]
    padding = [300 - len(reference.prompt) for reference in chosen]
    ids = [[0] * count + reference.prompt for count, reference in zip(padding, chosen, strict=True)]
    seen = [[0] * count + [1] * (300 - count) for count in padding]
    with torch.inference_mode():
        out = model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(seen),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    assert len(out) == 3
    for reference, tokens in zip(chosen, out[:, 300:].tolist(), strict=True):
        reference.compare(tokens)


def test_alone(outputs_alone: list[list[int]], agree: Callable[..., None]) -> None:
    agree(outputs_alone)


def test_eight_at_once(
    references: list[Reference],
    smollm2_engine: Engines,
    agree: Callable[..., None],
    watch: Callable[[LLM], PlanWatch],
) -> None:
    engine = smollm2_engine()
    watching = watch(engine)
    agree(run(engine, [reference.prompt for reference in references]))
    assert max(len(plan.num_scheduled_tokens) for plan in watching.plans) == 8


def test_with_preemption(
    references: list[Reference],
    smollm2_engine: Engines,
    agree: Callable[..., None],
    watch: Callable[[LLM], PlanWatch],
) -> None:
    engine = smollm2_engine(num_gpu_blocks_override=33)  # 512 tokens for what eight requests want
    watching = watch(engine)
    agree(run(engine, [reference.prompt for reference in references]))
    print(f"{watching.preemptions} preemptions")
    assert watching.preemptions >= 3


@pytest.mark.parametrize("size", [24, 50, 128])
def test_chunked_prefill(
    size: int,
    references: list[Reference],
    smollm2_engine: Engines,
    agree: Callable[..., None],
    watch: Callable[[LLM], PlanWatch],
) -> None:
    engine = smollm2_engine(max_num_batched_tokens=size, max_num_seqs=len(LENGTHS))
    watching = watch(engine)
    agree(run(engine, [reference.prompt for reference in references]))
    assert max(plan.total_num_scheduled_tokens for plan in watching.plans) == size
