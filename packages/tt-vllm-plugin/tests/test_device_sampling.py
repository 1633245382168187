import logging

import attrs
import pytest
from prometheus_client import CollectorRegistry
from tt_registry import Capabilities
from tt_sampling import Phase, Reason
from tt_scheduler import Phase as Scheduled
from vllm.sampling_params import SamplingParams
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.device_sampling import DeviceSampler
from vllm_tt_plugin.metrics import RouteMetrics
from vllm_tt_plugin.requests import RequestState, RequestTable, needs_of

from .plans import Planner, Told, greedy

ABLE = Capabilities(supports_sample_on_device=True, max_device_top_k=32)


def state(name: str = "a", sampling: SamplingParams | None = None) -> RequestState:
    sampling = sampling or greedy()
    return RequestState(name, [1, 2], sampling, needs_of(sampling), output=[3])


def sampler(capabilities: Capabilities = ABLE, **settings: object) -> DeviceSampler:
    return DeviceSampler.of(TTConfig.parse({"sample_on_device_mode": "all", **settings}), capabilities)


@pytest.mark.parametrize(
    ("capabilities", "settings", "prefill", "decode"),
    [
        (ABLE, {}, None, None),
        (ABLE, {"sample_on_device_mode": "decode_only"}, Reason.PREFILL, None),
        (ABLE, {"sample_on_device_mode": None}, Reason.HOST_MODE, Reason.HOST_MODE),
        (ABLE, {"always_compat_sampling": True}, Reason.ALWAYS_COMPAT, Reason.ALWAYS_COMPAT),
        (Capabilities(), {}, Reason.NO_DEVICE_SAMPLER, Reason.NO_DEVICE_SAMPLER),
    ],
)
def test_where_whole_steps_go(
    capabilities: Capabilities, settings: dict[str, object], prefill: Reason | None, decode: Reason | None
) -> None:
    device = sampler(capabilities, **settings)
    for phase, reason in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)):
        route = device.route([state()], phase)
        assert route.reasons == (((None, reason),) if reason else ())
    assert device.may_sample == (decode is None)


def test_processors_of_the_users_see_every_request() -> None:
    device = DeviceSampler.of(TTConfig.parse({"sample_on_device_mode": "all"}), ABLE, custom_processors=True)
    assert device.route([state()], Phase.DECODE).reasons == (("a", Reason.STATEFUL_PROCESSORS),)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SamplingParams(temperature=1.0, top_k=33), Reason.TOP_K),
        (SamplingParams(temperature=1.0), Reason.TOP_K),
        (SamplingParams(temperature=1.0, top_k=5, min_p=0.2), Reason.MIN_P),
        (greedy(logprobs=0), Reason.LOGPROBS),
        (greedy(logit_bias={1: 2.0}), Reason.LOGIT_BIAS),
        (greedy(min_tokens=3), Reason.MIN_TOKENS),
    ],
)
def test_one_request_sends_its_step_to_the_host(sampling: SamplingParams, reason: Reason) -> None:
    route = sampler().route([state("a"), state("b", sampling)], Phase.DECODE)
    assert route.reasons == (("b", reason),)


def test_logprobs_go_with_what_the_model_declares_and_only_raw_ones() -> None:
    fits = {"none": [False, False], "sampled": [True, False], "top32": [True, True]}
    for kind, expected in fits.items():
        device = sampler(attrs.evolve(ABLE, device_logprobs=kind))
        asked = [state("a", greedy(logprobs=count)) for count in (0, 5)]
        assert [device.route([one], Phase.PREFILL).on_device for one in asked] == expected
    settings = TTConfig.parse({"sample_on_device_mode": "all"})
    able = attrs.evolve(ABLE, device_logprobs="top32")
    other = DeviceSampler.of(settings, able, logprobs_mode="processed_logprobs")
    assert other.route([state("a", greedy(logprobs=5))], Phase.DECODE).reasons == (("a", Reason.LOGPROBS),)


def test_a_row_comes_back_when_it_may_end() -> None:
    device = sampler()
    held = state("a", greedy(min_tokens=3))
    later = state("b", greedy(min_tokens=4))
    rows = [state("c"), held, later]
    turns = []
    for step in range(4):
        turns.append(device.samples_decode(rows, changed=step == 0))
        held.output.append(7)
        later.output.append(7)
    assert turns == [False, False, False, True]
    del later.output[2:]  # a preemption dropped tokens that were under way
    assert not device.samples_decode(rows, changed=True)


def test_steps_are_counted_by_where_and_why_and_logged_when_that_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    registry = CollectorRegistry()
    device = attrs.evolve(sampler(), metrics=RouteMetrics(registry=registry))
    rows = [
        state("a"),
        state("b", greedy(logit_bias={1: 2.0}, min_tokens=9)),
        state("c", greedy(min_tokens=9)),
    ]
    expected = {
        ("tt:sampled_steps_total", (("phase", "prefill"), ("where", "device"))): 1,
        ("tt:sampled_steps_total", (("phase", "decode"), ("where", "host"))): 3,
        ("tt:host_sampling_reasons_total", (("reason", "logit_bias"),)): 3,
        ("tt:host_sampling_reasons_total", (("reason", "min_tokens"),)): 3,
    }

    def counts_after_some_steps() -> list[float]:
        assert device.samples_prefill([])
        assert device.samples_prefill(rows[:1])
        for step in range(3):
            assert not device.samples_decode(rows, changed=step == 0)
        device.metrics.write()
        return [registry.get_sample_value(name, dict(labels)) or 0.0 for name, labels in expected]

    with caplog.at_level(logging.DEBUG, "vllm.tt_plugin"):
        # Twice, for where a process has several engines, counters of one name share what they count.
        first, second = counts_after_some_steps(), counts_after_some_steps()
    device.metrics.write()
    assert [now - before for now, before in zip(second, first, strict=True)] == list(expected.values())
    assert len([one for metric in registry.collect() for one in metric.samples if "_total" in one.name]) == 4
    (told,) = {message for message in caplog.messages if "decode" in message}
    assert "b: it has a logit bias" in told


def test_penalties_need_a_device_that_knows_them_and_a_decode() -> None:
    penalised = state("a", greedy(presence_penalty=1.0))
    assert sampler().route([penalised], Phase.PREFILL).reasons == (("a", Reason.PREFILL_PENALTIES),)
    assert sampler().route([penalised], Phase.DECODE).on_device
    ignorant = sampler(attrs.evolve(ABLE, supports_device_penalties=False))
    again = state("a", greedy(presence_penalty=1.0))
    assert ignorant.route([again], Phase.DECODE).reasons == (("a", Reason.PENALTIES),)


def holding(*held: tuple[int, Told]) -> tuple[RequestTable, Planner]:
    """A table in which each of `held` is on its row."""
    table, planner = RequestTable(8), Planner(8, 40)
    by_row = dict(held)
    fillers = {row: Told(f"filler{row}", [1], greedy()) for row in range(max(by_row)) if row not in by_row}
    work = [(request, len(request.prompt)) for _, request in sorted({**by_row, **fillers}.items())]
    table.apply(planner.step(Scheduled.PREFILL, work))
    for filler in fillers.values():
        planner.finish(filler)
    table.apply(planner.step(Scheduled.EMPTY, []))
    return table, planner


def test_parameters_are_packed_by_row_and_kept_while_rows_stay() -> None:
    device = sampler()
    a = Told("a", [1, 2], greedy())
    b = Told("b", [1, 2], SamplingParams(temperature=0.7, top_k=4, seed=11))
    table, planner = holding((0, a), (2, b))
    first = device.for_decode(table, 4)
    assert first.params.temperature == [0.0, 0.0, 0.7, 0.0]
    assert first.params.seed == [None, None, 11, None]
    assert first.params.top_k == [0, 1, 4, 1]  # rows without a request are an argmax
    assert (first.prompt_tokens, first.output_tokens) == (None, None)
    assert device.for_decode(table, 4).params is first.params
    assert device.for_decode(table, 8).params.seed == [None, None, 11] + 5 * [None]
    planner.preempt(b)
    table.apply(planner.step(Scheduled.PREFILL, [(b, 2)]))
    assert device.for_decode(table, 8).params.seed == [None, 11] + 6 * [None]
    planner.finish(a)
    table.apply(planner.step(Scheduled.EMPTY, []))
    assert device.for_decode(table, 8).params.temperature == [0.0, 0.7] + 6 * [0.0]


def test_histories_go_along_only_with_penalties() -> None:
    device = sampler()
    table, planner = holding(
        (0, Told("a", [1, 2], greedy())), (1, Told("p", [3], greedy(repetition_penalty=1.5)))
    )
    for name, token in (("a", 5), ("p", 6), ("p", 7)):
        table[name].output.append(token)
    sampling = device.for_decode(table, 3)
    assert sampling.prompt_tokens is not None
    assert sampling.output_tokens is not None
    assert sampling.prompt_tokens.tolist() == [[1, 2], [3, -1], [-1, -1]]
    assert sampling.output_tokens.tolist() == [[5, -1], [6, 7], [-1, -1]]
    table["p"].output.append(4)
    later = device.for_decode(table, 3).output_tokens
    assert later is not None
    assert later.tolist() == [[5, -1, -1], [6, 7, 4], [-1, -1, -1]]
    planner.finished.add("p")
    table.apply(planner.step(Scheduled.EMPTY, []))
    assert device.for_decode(table, 3).prompt_tokens is None


def test_a_chunk_that_is_not_the_last_is_neutral_in_a_prefill() -> None:
    sampling = sampler().for_prefill([None, state("b", SamplingParams(temperature=0.7, top_k=4))])
    assert sampling.params.temperature == [0.0, 0.7]
    assert sampling.params.top_k == [1, 4]


@pytest.mark.parametrize("declared", [False, True])
def test_a_seeded_row_is_drawn_on_a_device_that_draws_as_the_host_does(declared: bool) -> None:
    device = sampler(attrs.evolve(ABLE, supports_device_seeds=declared))
    seeded = state(sampling=SamplingParams(temperature=1.0, seed=7, top_k=5))
    for phase in Phase:
        assert device.route([seeded], phase).on_device is declared
        assert device.route([state(sampling=SamplingParams(temperature=1.0, top_k=5))], phase).on_device
        assert device.route([state(sampling=greedy(seed=7))], phase).on_device, "greedy rows draw nothing"
