"""What starts when, how much of it, and what happens where memory or a step's room is short."""

from collections.abc import Callable

import attrs
import pytest
from oracle_text import continuation
from prometheus_client import CollectorRegistry
from tt_scheduler import BoundedGap, Choice, Phase, PrefillFirst, StepRecord, Work
from vllm import LLM, SamplingParams
from vllm_tt_plugin.metrics import StepMetrics
from vllm_tt_plugin.step_director import StepDirector

from .conftest import ORACLE_VOCAB, Engines, core_of
from .drive import Driver
from .watch import PlanWatch

Watch = Callable[[LLM], PlanWatch]
FIRST, SECOND, THIRD = list(range(1, 10)), list(range(20, 27)), list(range(40, 45))
PLENTY = [*range(60), *range(6)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return continuation(prompt, max_tokens, ORACLE_VOCAB)


def test_chunks_and_decodes_take_turns_as_configured(oracle_engine: Engines, watch: Watch) -> None:
    engine = oracle_engine(max_num_batched_tokens=4)
    watching, driver = watch(engine), Driver(engine)
    driver.add("decodes", THIRD, greedy(30))
    driver.step(8)
    driver.add("long", [7] * 24, greedy(1))
    begin = len(watching.plans)
    driver.step(9)
    two_to_one = [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]
    assert watching.phases[begin:] == two_to_one * 3
    driver.drain()


def test_a_prompt_that_does_not_fit_yet_leaves_decodes_running(oracle_engine: Engines, watch: Watch) -> None:
    engine = oracle_engine(max_model_len=72, num_gpu_blocks_override=19)
    watching, driver = watch(engine), Driver(engine)
    driver.add("running", FIRST, greedy(40))
    driver.step(2)
    driver.add("waiting", PLENTY, greedy(4))
    driver.step(20)
    assert Phase.EMPTY not in watching.phases
    assert len(driver.tokens["running"]) == 22, "each step gave a token"
    driver.drain()
    assert driver.tokens == {"running": expected(FIRST, 40), "waiting": expected(PLENTY, 4)}


def test_a_request_that_ends_while_a_prompt_does_not_fit_gives_its_row_back(
    oracle_engine: Engines, watch: Watch
) -> None:
    engine = oracle_engine(max_model_len=72, num_gpu_blocks_override=19, max_num_seqs=2)
    watching, driver = watch(engine), Driver(engine)
    driver.add("ends", FIRST, greedy(4))
    driver.add("runs", SECOND, greedy(12))
    driver.step()
    driver.add("does not fit", PLENTY, greedy(4))
    driver.add("behind", THIRD, greedy(4))
    driver.drain(limit=60)
    assert len(watching.plans) < 40
    prompts = {"ends": (FIRST, 4), "runs": (SECOND, 12), "does not fit": (PLENTY, 4), "behind": (THIRD, 4)}
    assert driver.tokens == {name: expected(*request) for name, request in prompts.items()}
    assert not watching.owners


def test_a_chunk_that_no_longer_fits_gives_its_row_back(oracle_engine: Engines, watch: Watch) -> None:
    engine = oracle_engine(
        max_model_len=72,
        num_gpu_blocks_override=19,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        additional_config={"tt": {"decode_interleave_prefill_steps": 1}},
    )
    watching, driver = watch(engine), Driver(engine)
    driver.add("grows", PLENTY[:42], greedy(12))
    driver.step(6)
    # 7 blocks are free and hold 28 tokens, but the other's third decode takes one of them.
    driver.add("chunks", PLENTY[::-1][:28], greedy(4))
    driver.drain(limit=60)
    assert watching.preemptions
    assert driver.tokens == {
        "grows": expected(PLENTY[:42], 12),
        "chunks": expected(PLENTY[::-1][:28], 4),
    }
    assert not watching.owners


def test_prompts_cut_short_leave_free_what_others_still_need(oracle_engine: Engines, watch: Watch) -> None:
    """Each chunk takes 8 tokens of a prompt, so that a second prompt could start beside the first."""
    engine = oracle_engine(max_model_len=72, num_gpu_blocks_override=19, long_prefill_token_threshold=8)
    watching, driver = watch(engine), Driver(engine)
    driver.add("first", PLENTY[:40], greedy(4))
    driver.add("second", PLENTY[:1:-1][:40], greedy(4))
    driver.drain(limit=60)
    assert not watching.preemptions
    assert driver.tokens == {
        "first": expected(PLENTY[:40], 4),
        "second": expected(PLENTY[:1:-1][:40], 4),
    }


def test_a_prompt_that_is_cut_is_cut_at_a_warmed_up_size(oracle_engine: Engines, watch: Watch) -> None:
    engine = oracle_engine(max_model_len=256, max_num_batched_tokens=200)
    watching, driver = watch(engine), Driver(engine)
    long = PLENTY * 3 + PLENTY[:52]
    driver.add("long", long, greedy(1))
    driver.add("short", FIRST, greedy(1))
    driver.drain()
    counts = [
        list(plan.num_scheduled_tokens.values()) for plan in watching.plans if plan.phase is Phase.PREFILL
    ]
    assert counts == [[128], [122, 9]]
    assert driver.tokens == {"long": expected(long, 1), "short": expected(FIRST, 1)}


@attrs.define
class Told(PrefillFirst):
    """A policy that caps prefill steps and keeps what it was told."""

    cap: int
    steps: list[StepRecord] = attrs.field(factory=list)

    def choose(self, work: Work) -> Choice:
        choice = super().choose(work)
        return Choice(choice.phase, self.cap) if choice.phase is Phase.PREFILL else choice

    def ran(self, step: StepRecord, work: Work) -> None:
        self.steps.append(step)


def test_a_cap_and_what_a_policy_is_told_count_tokens_as_padded(
    oracle_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = oracle_engine(max_model_len=256, max_num_batched_tokens=512)
    policy = Told(cap=256)
    monkeypatch.setattr(core_of(engine).scheduler, "_director", StepDirector(policy, rows_per_lane=4))
    driver = Driver(engine)
    for name in "abc":
        driver.add(name, THIRD, greedy(1))
    driver.add("long", PLENTY * 3, greedy(1))
    driver.drain()
    assert policy.steps == [StepRecord(Phase.PREFILL, tokens) for tokens in (256, 256, 128)]
    assert driver.tokens["long"] == expected(PLENTY * 3, 1)


def test_steps_over_the_target_are_counted(oracle_engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, registry = oracle_engine(max_num_batched_tokens=8), CollectorRegistry()
    metrics = StepMetrics(registry=registry)
    before = counted(registry)  # other engines of this process may have written to the same files
    director = StepDirector(BoundedGap(1e-9, (8,)), rows_per_lane=4, metrics=metrics)
    monkeypatch.setattr(core_of(engine).scheduler, "_director", director)
    driver = Driver(engine)
    driver.add("decodes", FIRST, greedy(12))
    driver.step(4)
    driver.add("long", PLENTY[:40], greedy(1))
    driver.drain()
    metrics.write([])
    assert counted(registry) - before == 5


def counted(registry: CollectorRegistry) -> float:
    return registry.get_sample_value("tt:over_target_steps_total") or 0.0


def test_a_lane_that_was_left_no_room_prefills_next(oracle_engine: Engines, watch: Watch) -> None:
    engine = oracle_engine(
        data_parallel_size=2,
        block_size=32,
        additional_config={"tt": {"phase_policy": "bounded_gap", "target_itl_ms": 1}},
    )
    watching, driver = watch(engine), Driver(engine)
    for name in "ab":
        driver.add(name, THIRD, greedy(30))
    driver.step(3)
    for name in "cd":
        driver.add(name, SECOND, greedy(1))
    begin = len(watching.plans)
    driver.step(4)
    assert watching.phases[begin:] == [Phase.PREFILL, Phase.DECODE] * 2
    assert driver.finished.keys() == {"c", "d"}
    driver.drain()


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "planned ahead"])
def test_memory_that_runs_short_costs_one_request_its_row(
    ahead: bool, oracle_engine: Engines, watch: Watch
) -> None:
    """Four requests come to need a block each in one step, and two blocks are free."""
    engine = oracle_engine(
        max_model_len=72,
        num_gpu_blocks_override=19,
        async_scheduling=ahead,
        additional_config={"tt": {"sample_on_device_mode": "all"}},
    )
    watching, driver = watch(engine), Driver(engine)
    prompts = {str(start): PLENTY[start:][:14] for start in range(4)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, greedy(5))
    driver.drain(limit=40)
    preempted = [len(plan.preempted_req_ids or ()) for plan in watching.plans]
    assert sum(preempted) == 1
    assert driver.tokens == {name: expected(prompt, 5) for name, prompt in prompts.items()}
