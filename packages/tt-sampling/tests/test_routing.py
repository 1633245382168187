import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_sampling import (
    DeviceCapabilities,
    Phase,
    Reason,
    RowNeeds,
    RowParams,
    SampleMode,
    route,
    route_rows,
    row_reasons,
)

ABLE = DeviceCapabilities(
    can_sample=True,
    seeds=True,
    min_p=True,
    logprobs="top32",
    grammar=True,
    logit_bias=True,
    allowed_tokens=True,
    bad_words=True,
    min_tokens=True,
    stateful_processors=True,
)
PLAIN = DeviceCapabilities(can_sample=True, max_top_k=32, penalties=False)
GREEDY = RowNeeds(RowParams(temperature=0.0))
EDITS = ["grammar", "logit_bias", "allowed_tokens", "bad_words", "min_tokens", "stateful_processors"]

params = st.builds(
    RowParams,
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([-1, 0, 1, 32, 33]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    seed=st.sampled_from([None, 3]),
    num_logprobs=st.sampled_from([-2, -1, 0, 5, 33]),
)
needs = st.builds(RowNeeds, params, **dict.fromkeys(EDITS, st.booleans()))
devices = st.builds(
    DeviceCapabilities,
    can_sample=st.booleans(),
    max_top_k=st.sampled_from([None, 32]),
    logprobs=st.sampled_from(["none", "sampled", "top32"]),
    **dict.fromkeys(["penalties", "seeds", "min_p", *EDITS], st.booleans()),
)


@pytest.mark.parametrize("top_k", [-1, 0, 33])
def test_random_rows_beyond_the_devices_candidates_go_to_the_host(top_k: int) -> None:
    row = RowNeeds(RowParams(temperature=0.7, top_k=top_k))
    assert row_reasons(row, PLAIN, Phase.DECODE) == (Reason.TOP_K,)
    assert row_reasons(row, attrs.evolve(PLAIN, max_top_k=None), Phase.DECODE) == ()


@pytest.mark.parametrize("row", [RowParams(temperature=0.0), RowParams(top_k=1, temperature=2.0, top_p=0.1)])
def test_argmax_rows_need_neither_candidates_nor_seed_nor_min_p(row: RowParams) -> None:
    assert row_reasons(RowNeeds(attrs.evolve(row, seed=7, min_p=0.2)), PLAIN, Phase.DECODE) == ()


@pytest.mark.parametrize(
    ("row", "capability", "reason"),
    [
        (RowParams(temperature=0.0, presence_penalty=-0.1), "penalties", Reason.PENALTIES),
        (RowParams(temperature=0.0, frequency_penalty=0.1), "penalties", Reason.PENALTIES),
        (RowParams(temperature=0.0, repetition_penalty=0.9), "penalties", Reason.PENALTIES),
        (RowParams(seed=0), "seeds", Reason.SEED),
        (RowParams(min_p=0.1), "min_p", Reason.MIN_P),
    ],
)
def test_a_parameter_the_device_lacks_goes_to_the_host(
    row: RowParams, capability: str, reason: Reason
) -> None:
    assert row_reasons(RowNeeds(row), ABLE, Phase.DECODE) == ()
    without = attrs.evolve(ABLE, **{capability: False})
    assert row_reasons(RowNeeds(row), without, Phase.DECODE) == (reason,)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_logits_the_device_lacks_goes_to_the_host(edit: str) -> None:
    row = RowNeeds(RowParams(temperature=0.0), **{edit: True})
    assert row_reasons(row, ABLE, Phase.DECODE) == ()
    assert row_reasons(row, attrs.evolve(ABLE, **{edit: False}), Phase.DECODE) == (Reason[edit.upper()],)


def test_prefill_calls_carry_neither_histories_nor_masks() -> None:
    assert row_reasons(attrs.evolve(GREEDY, grammar=True), ABLE, Phase.PREFILL) == (Reason.GRAMMAR,)
    row = RowNeeds(RowParams(repetition_penalty=1.1))
    assert row_reasons(row, ABLE, Phase.PREFILL) == (Reason.PREFILL_PENALTIES,)


@pytest.mark.parametrize(("kind", "fits"), [("none", {-2}), ("sampled", {-2, 0}), ("top32", {-2, 0, 1, 32})])
def test_logprobs_beyond_the_devices_go_to_the_host(kind: str, fits: set[int]) -> None:
    device = attrs.evolve(ABLE, logprobs=kind)
    for count in (-2, -1, 0, 1, 32, 33):
        row = RowNeeds(RowParams(temperature=0.0, num_logprobs=count))
        assert (row_reasons(row, device, Phase.DECODE) == ()) == (count in fits)


@pytest.mark.parametrize(
    "row",
    [
        RowNeeds(RowParams(top_k=0, num_logprobs=0)),
        RowNeeds(RowParams(temperature=0.0, repetition_penalty=1.5, num_logprobs=3)),
        RowNeeds(RowParams(temperature=0.0, num_logprobs=3), grammar=True),
    ],
)
def test_a_token_that_may_leave_the_top_32_takes_its_logprob_from_the_host(row: RowNeeds) -> None:
    assert row_reasons(row, ABLE, Phase.DECODE) == (Reason.SAMPLED_LOGPROB,)


def test_a_single_logprob_tells_no_rank_but_the_first() -> None:
    device = attrs.evolve(ABLE, logprobs="sampled")
    assert row_reasons(RowNeeds(RowParams(top_k=1, num_logprobs=0)), device, Phase.DECODE) == ()
    drawn = RowNeeds(RowParams(top_k=4, num_logprobs=0))
    assert row_reasons(drawn, ABLE, Phase.DECODE) == ()
    assert row_reasons(drawn, device, Phase.DECODE) == (Reason.SAMPLED_LOGPROB,)


@pytest.mark.parametrize(
    ("mode", "phase", "compat", "reason"),
    [
        (SampleMode.HOST, Phase.DECODE, False, Reason.HOST_MODE),
        (SampleMode.DECODE_ONLY, Phase.PREFILL, False, Reason.PREFILL),
        (SampleMode.DECODE_ONLY, Phase.DECODE, False, None),
        (SampleMode.ALL, Phase.PREFILL, False, None),
        (SampleMode.ALL, Phase.DECODE, True, Reason.ALWAYS_COMPAT),
    ],
)
def test_mode_and_phase(mode: SampleMode, phase: Phase, compat: bool, reason: Reason | None) -> None:
    answer = route([("a", GREEDY)], PLAIN, mode, phase, compat)
    assert answer.on_device == (reason is None)
    assert answer.reasons == (((None, reason),) if reason else ())


def test_one_row_takes_the_step_to_the_host_and_is_named() -> None:
    seeded = RowNeeds(RowParams(top_k=4, seed=1, min_p=0.1))
    answer = route([("a", GREEDY), ("b", seeded)], PLAIN, SampleMode.ALL, Phase.DECODE)
    assert answer.reasons == (("b", Reason.SEED), ("b", Reason.MIN_P))
    assert route([("a", GREEDY)], PLAIN, SampleMode.ALL, Phase.DECODE).on_device


@given(st.lists(needs, max_size=4), devices, st.sampled_from(SampleMode), st.sampled_from(Phase))
def test_a_step_is_on_the_device_exactly_if_each_row_alone_is(
    rows: list[RowNeeds], device: DeviceCapabilities, mode: SampleMode, phase: Phase
) -> None:
    answer = route(list(enumerate(rows)), device, mode, phase)
    alone = [route([(0, row)], device, mode, phase).on_device for row in rows]
    assert answer.on_device == (route([], device, mode, phase).on_device and all(alone))
    kept = {i: row_reasons(row, device, phase) for i, row in enumerate(rows)}
    assert route_rows(kept.items(), device, mode, phase) == answer


@given(needs, devices, st.sampled_from(Phase))
def test_a_more_able_device_keeps_every_row_it_had(
    row: RowNeeds, device: DeviceCapabilities, phase: Phase
) -> None:
    if not row_reasons(row, device, phase):
        for name in ("penalties", "seeds", "min_p", *EDITS):
            assert row_reasons(row, attrs.evolve(device, **{name: True}), phase) == ()


def test_labels_are_fit_for_metrics() -> None:
    labels = [reason.label for reason in Reason]
    assert len(set(labels)) == len(labels)
    assert all(label.isidentifier() and label.islower() for label in labels)
