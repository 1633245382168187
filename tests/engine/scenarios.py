"""What may happen to an engine, written by Hypothesis; how to play it; and what must come of it."""

from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from oracle_text import context_hash, logits_of
from tt_sampling import RowParams, pack, sample
from vllm import LLM, SamplingParams

from .configurations import BLOCK
from .conftest import ORACLE_VOCAB, lanes_of
from .drive import Driver

SHARED = [[(13 * i + 5 * stream) % ORACLE_VOCAB for i in range(10 * BLOCK)] for stream in range(4)]


@attrs.frozen
class Drawing:
    """How the tokens of a request are chosen. All of it is repeatable: greedy, or with a seed."""

    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    on_host: bool = False
    """A bias of nothing makes one difference: the host must sample the step."""

    @property
    def parameters(self) -> dict[str, Any]:
        """By names that vLLM's parameters and those of the definition share."""
        shared = attrs.asdict(self, filter=lambda field, _: field.name != "on_host")
        return shared | {"temperature": 0.0 if self.seed is None else 1.0}


@attrs.frozen
class Arrival:
    prompt: tuple[int, ...]
    max_tokens: int
    drawing: Drawing
    priority: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            **self.drawing.parameters,
            logit_bias={0: 0.0} if self.drawing.on_host else None,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )

    def text(self) -> list[int]:
        """The tokens of this request by the definition of sampling, without an engine."""
        output = list[int]()
        params = pack([RowParams(**self.drawing.parameters)], 1)
        while len(output) < self.max_tokens:
            tokens = [*self.prompt, *output]
            logits = logits_of(context_hash(tokens), ORACLE_VOCAB)[None]
            histories = torch.tensor([self.prompt]), torch.tensor([output], dtype=torch.long)
            output.append(int(sample(logits, params, [len(tokens)], *histories).ids[0]))
        return output


@attrs.frozen
class Event:
    """Happens after ``steps`` more steps."""

    steps: int
    what: Arrival | int | None
    """An arrival, the index of a request to abort, or None: all that run are preempted."""


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    shared = draw(st.sampled_from(SHARED))[: draw(st.integers(0, len(SHARED[0])))]
    own = draw(st.lists(st.integers(0, ORACLE_VOCAB - 1), min_size=1, max_size=12))
    return (*shared, *own)


seeds = st.sampled_from([1, 2**63 - 1, -5])
drawings = (
    st.just(Drawing())
    | st.builds(Drawing, seed=seeds)
    | st.builds(Drawing, seed=seeds, top_k=st.integers(2, 9), top_p=st.sampled_from([0.6, 1.0]))
    | st.builds(
        Drawing,
        seed=st.none() | seeds,
        repetition_penalty=st.sampled_from([0.7, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.8]),
    )
    | st.builds(Drawing, seed=st.none() | seeds, on_host=st.just(True))
)
arrivals = st.builds(Arrival, prompts(), st.integers(4, 18) | st.integers(1, 3), drawings, st.integers(0, 2))
events = st.builds(Event, st.integers(0, 6), arrivals | arrivals | arrivals | st.integers(0, 9) | st.none())
timelines = st.lists(events, min_size=12, max_size=20)


def live(driver: Driver, timeline: list[Event]) -> None:
    """Let all of it happen, and then what is left come to its end."""
    for event in timeline:
        driver.step(event.steps)
        match event.what:
            case Arrival() as arrival:
                driver.add(str(len(driver.tokens)), arrival.prompt, arrival.params, arrival.priority)
            case int(index) if str(index) in driver.tokens and str(index) not in driver.finished:
                driver.abort(str(index))
            case None:
                driver.reset_running()
    requests = [event.what for event in timeline if isinstance(event.what, Arrival)]
    # Were each token computed alone, and each twice more after preemptions, this would do.
    driver.drain(limit=sum(len(r.prompt) + r.max_tokens for r in requests) * 3 + 20)


def play(engine: LLM, timeline: list[Event]) -> int:
    """Each request gets the tokens of its own text, and gives back all that it had. Returns their number."""
    driver = Driver(engine)
    live(driver, timeline)
    requests = [event.what for event in timeline if isinstance(event.what, Arrival)]
    for index, arrival in enumerate(requests):
        name, text = str(index), arrival.text()
        if driver.finished[name] == "abort":
            text = text[: len(driver.tokens[name])]
        assert (name, driver.tokens[name]) == (name, text)
    for lane in lanes_of(engine):
        pool = lane.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"
    return sum(map(len, driver.tokens.values()))
