"""Phases, rows and promotions, step by step, where a particular order of events is what breaks."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from oracle_text import continuation
from tt_scheduler import Phase
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from .conftest import ORACLE_VOCAB, REFUSALS, Engines, core_of
from .drive import Driver
from .watch import PlanWatch

Watch = Callable[[LLM], PlanWatch]
WIRE_FORMS = pytest.mark.parametrize("v2_wire_form", [False, True], ids=["V1", "V2"])
FIRST, SECOND, THIRD = list(range(1, 10)), list(range(20, 27)), list(range(40, 45))


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
