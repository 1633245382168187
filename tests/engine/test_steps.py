"""Phases, rows and promotions, step by step, where a particular order of events is what breaks."""

import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from oracle_text import continuation
from prometheus_client import CollectorRegistry
from tt_scheduler import BoundedGap, Choice, Phase, PrefillFirst, StepRecord, Work
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm_tt_plugin.metrics import StepMetrics
from vllm_tt_plugin.step_director import StepDirector

from .conftest import ORACLE_VOCAB, REFUSALS, Engines, core_of
from .drive import Driver
from .watch import PlanWatch

Watch = Callable[[LLM], PlanWatch]
WIRE_FORMS = pytest.mark.parametrize("v2_wire_form", [False, True], ids=["V1", "V2"])
FIRST, SECOND, THIRD = list(range(1, 10)), list(range(20, 27)), list(range(40, 45))
PLENTY = [*range(60), *range(6)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return continuation(prompt, max_tokens, ORACLE_VOCAB)


@WIRE_FORMS
def test_a_resumed_request_replays_all_its_tokens_as_prefill_and_then_decodes(
    v2_wire_form: bool, oracle_engine: Engines, watch: Watch
) -> None:
    engine = oracle_engine(v2_wire_form=v2_wire_form, max_num_batched_tokens=8)
    watching, driver = watch(engine), Driver(engine)
    driver.add("first", FIRST, greedy(12))
    driver.step(7)
    assert watching.phases == [Phase.PREFILL] * 2 + [Phase.DECODE] * 5
    driver.reset_running()
    driver.drain()
    # 9 tokens of the prompt and 6 of its own are computed again, 8 a step.
    assert watching.phases[7:-1] == [Phase.PREFILL] * 2 + [Phase.DECODE] * 5
    assert driver.tokens["first"] == expected(FIRST, 12)


@WIRE_FORMS
def test_a_step_of_resumed_requests_alone_is_a_prefill(
    v2_wire_form: bool, oracle_engine: Engines, watch: Watch
) -> None:
    engine = oracle_engine(v2_wire_form=v2_wire_form)
    watching, driver = watch(engine), Driver(engine)
    driver.add("first", FIRST, greedy(9))
    driver.add("second", SECOND, greedy(9))
    driver.step(4)
    driver.reset_running()
    driver.step()
    plan = watching.plans[-1]
    assert plan.phase is Phase.PREFILL
    assert len(plan.preempted_req_ids or ()) == len(plan.rows) == len(plan.num_scheduled_tokens) == 2
    driver.drain()
    assert driver.tokens == {"first": expected(FIRST, 9), "second": expected(SECOND, 9)}


@WIRE_FORMS
def test_an_arrival_takes_the_row_of_a_request_preempted_in_the_same_step(
    v2_wire_form: bool, oracle_engine: Engines, watch: Watch
) -> None:
    engine = oracle_engine(v2_wire_form=v2_wire_form, max_num_seqs=2, scheduling_policy="priority")
    watching, driver = watch(engine), Driver(engine)
    first = driver.add("first", FIRST, greedy(9), priority=1)
    second = driver.add("second", SECOND, greedy(9), priority=2)
    driver.step(3)
    assert watching.owners == {0: first, 1: second}
    driver.reset_running()
    urgent = driver.add("urgent", THIRD, greedy(9), priority=0)
    driver.step()
    assert watching.plans[-1].preempted_req_ids == {first, second}
    assert watching.owners == {0: urgent, 1: first}
    driver.drain()
    prompts = {"first": FIRST, "second": SECOND, "urgent": THIRD}
    assert driver.tokens == {name: expected(prompt, 9) for name, prompt in prompts.items()}


def test_rows_stay_with_their_requests_while_others_leave(oracle_engine: Engines, watch: Watch) -> None:
    engine = oracle_engine(max_num_seqs=3)
    watching, driver = watch(engine), Driver(engine)
    names = {
        name: driver.add(name, prompt, greedy(9))
        for name, prompt in (("a", FIRST), ("b", SECOND), ("c", THIRD))
    }
    driver.step(2)
    driver.abort("a")
    driver.step()
    assert watching.owners == {1: names["b"], 2: names["c"]}
    late = driver.add("late", FIRST[::-1], greedy(3))
    driver.step()
    assert watching.owners == {0: late, 1: names["b"], 2: names["c"]}
    driver.drain()
    assert driver.tokens["b"] == expected(SECOND, 9)
    assert driver.tokens["c"] == expected(THIRD, 9)
    assert driver.tokens["late"] == expected(FIRST[::-1], 3)


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
    director = StepDirector(BoundedGap(1e-9, (8,)), rows_per_lane=4, metrics=metrics)
    monkeypatch.setattr(core_of(engine).scheduler, "_director", director)
    driver = Driver(engine)
    driver.add("decodes", FIRST, greedy(12))
    driver.step(4)
    driver.add("long", PLENTY[:40], greedy(1))
    driver.drain()
    metrics.write([])
    assert registry.get_sample_value("tt:over_target_steps_total") == 5
    assert registry.get_sample_value("tt:steps_total", {"phase": "prefill"}) == 7


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


class SlowGrammars:
    """Holds back the compilation of grammars in vLLM until it is released."""

    def __init__(self, engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        manager = core_of(engine).structured_output_manager
        create = manager._create_grammar

        def wait_and_create(*args: Any, **kwargs: Any) -> Any:
            assert self.release.wait(timeout=60)
            return create(*args, **kwargs)

        monkeypatch.setattr(manager, "_create_grammar", wait_and_create)


def structured(**constraint: Any) -> SamplingParams:
    constraints: Any = StructuredOutputsParams(**constraint)
    return SamplingParams(temperature=0, max_tokens=12, structured_outputs=constraints)


def test_a_grammar_that_compiles_slowly_waits_outside_the_batch_and_is_promoted(
    tiny_engine: Engines, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    plain = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    alone = engine.generate({"prompt_token_ids": FIRST}, plain, use_tqdm=False)[0].outputs[0].token_ids
    watching, driver, slow = watch(engine), Driver(engine), SlowGrammars(engine, monkeypatch)
    running = driver.add("running", FIRST, plain)
    driver.step(3)
    slow_name = driver.add("structured", SECOND, structured(choice=["lantern"]))
    begin = len(watching.plans)
    driver.step(10)
    assert watching.phases[begin:] == [Phase.DECODE] * 10
    assert all(plan.num_scheduled_tokens.keys() == {running} for plan in watching.plans[begin:])
    slow.release.set()
    for _ in range(50):
        driver.step()
        if slow_name in watching.owners.values():
            break
        threading.Event().wait(0.01)
    assert "running" not in driver.finished, "it is promoted while the other still runs"
    assert slow_name in watching.owners.values()
    assert watching.plans[-1].phase is Phase.PREFILL
    driver.drain()
    assert engine.get_tokenizer().decode(driver.tokens["structured"], skip_special_tokens=True) == "lantern"
    assert driver.tokens["running"] == list(alone)


def test_a_ready_grammar_does_not_slip_into_a_decode_step(tiny_engine: Engines, watch: Watch) -> None:
    engine = tiny_engine(max_num_seqs=3, max_num_batched_tokens=4)
    watching, driver = watch(engine), Driver(engine)
    driver.add("running", THIRD[:4], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    driver.step(2)
    driver.add("long", list(range(100, 124)), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    driver.step()
    driver.add("structured", SECOND, structured(choice=["lantern"]))
    threading.Event().wait(0.3)  # its grammar is ready by now
    driver.step(3)
    # Chunks of the long prompt leave no tokens for it, and the decode between them leaves some.
    assert watching.phases[-3:] == [Phase.PREFILL, Phase.DECODE, Phase.PREFILL]
    assert len(watching.owners) == 2
    driver.drain(limit=2_000)
    assert engine.get_tokenizer().decode(driver.tokens["structured"], skip_special_tokens=True) == "lantern"


def test_a_request_behind_a_slow_grammar_overtakes_it(
    tiny_engine: Engines, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    watching, driver, slow = watch(engine), Driver(engine), SlowGrammars(engine, monkeypatch)
    driver.add("structured", SECOND, structured(regex="[ab]{3}"))
    driver.step(2)
    assert watching.phases == [Phase.EMPTY] * 2
    driver.add("behind", THIRD, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    driver.step(4)
    assert driver.finished == {"behind": "length"}
    slow.release.set()
    threading.Event().wait(0.2)
    driver.drain(limit=200_000)
    assert set(engine.get_tokenizer().decode(driver.tokens["structured"], skip_special_tokens=True)) <= {
        "a",
        "b",
    }


def test_a_grammar_that_fails_to_compile_ends_its_request_alone(tiny_engine: Engines) -> None:
    engine = tiny_engine()
    driver = Driver(engine)
    driver.add("running", FIRST, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    driver.step(2)
    try:
        driver.add("broken", SECOND, structured(regex="(unclosed"))
    except REFUSALS:
        driver.tokens.pop("broken")  # vLLM sees some faults before it queues a request
    driver.drain(limit=500)
    assert driver.finished.pop("running") == "length"
    assert driver.finished in ({}, {"broken": "error"})
