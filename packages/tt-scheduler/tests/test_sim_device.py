import json
import random
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_scheduler.sim import Device, SimStep, read_measured

SIZES = (128, 256, 512)
COSTS = ("prefill_fixed_s", "prefill_token_s", "decode_fixed_s", "decode_row_s", "switch_s")
devices = st.builds(
    Device,
    prefill_fixed_s=st.floats(0.001, 0.2),
    prefill_token_s=st.floats(1e-5, 5e-4),
    decode_fixed_s=st.floats(0.005, 0.1),
    decode_row_s=st.floats(1e-5, 0.002),
    switch_s=st.floats(0, 0.05),
    padded_to=st.sampled_from([(), SIZES]),
)
SOME = [
    *(SimStep((tokens,), 0, changes) for tokens in (50, 128, 300, 512, 2000) for changes in (True, False)),
    SimStep((100, 100, 400), 0, False),
    *(SimStep((), rows, changes) for rows in (1, 7, 20, 32) for changes in (True, False)),
]
WHOLE = Device(
    prefill_fixed_s=1.0,
    prefill_token_s=0.01,
    decode_fixed_s=3.0,
    decode_row_s=0.1,
    switch_s=0.5,
    padded_to=SIZES,
)


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        (SimStep((100,)), 1 + 1.28),
        (SimStep((100, 300)), 1 + 1.28 + 5.12),
        (SimStep((600,)), 1 + 10.24),  # twice the largest
        (SimStep((), 4), 3.4),
        (SimStep((), 4, changes_phase=True), 3.9),
        (SimStep((256,), 4), 3 + 2.56 + 0.4),  # mixed: the larger fixed part once
    ],
)
def test_what_a_step_costs(step: SimStep, seconds: float) -> None:
    assert WHOLE.seconds(step) == pytest.approx(seconds)


@settings(deadline=None)
@given(devices)
def test_a_fit_to_exact_steps_finds_the_costs(device: Device) -> None:
    measured = [(step, device.seconds(step)) for step in SOME]
    fitted = Device(padded_to=device.padded_to).fitted(measured)
    for cost in COSTS:
        assert getattr(fitted, cost) == pytest.approx(getattr(device, cost), rel=1e-4, abs=1e-7)


@settings(deadline=None)
@given(devices, st.integers(0, 50))
def test_a_fit_to_noisy_steps_foretells_steps(device: Device, seed: int) -> None:
    dice = random.Random(seed)
    measured = [(step, device.seconds(step) * dice.uniform(0.95, 1.05)) for step in SOME * 5]
    fitted = device.fitted(measured)
    for step in SOME:
        assert fitted.seconds(step) == pytest.approx(device.seconds(step), rel=0.06)


def test_a_fit_leaves_what_was_not_varied_at_nothing() -> None:
    fitted = Device().fitted([(SimStep((128,)), 0.3), (SimStep((256,)), 0.2), (SimStep((), 4), 0.1)])
    assert fitted.prefill_token_s == 0, "times that fall with the tokens cannot come from them"
    assert fitted.switch_s == 0
    assert fitted.seconds(SimStep((), 4)) == pytest.approx(0.1)


def test_a_fit_needs_both_phases() -> None:
    with pytest.raises(ValueError, match="both phases"):
        Device().fitted([(SimStep((128,)), 0.3)])


def test_measured_steps_are_read(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    steps = [(SimStep((512, 3), 0, True), 0.25), (SimStep((), 4, False), 0.1)]
    file.write_text("\n".join(json.dumps({**attrs.asdict(step), "seconds": s}) for step, s in steps))
    assert read_measured(file) == steps


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "nothing",
        '{"prefills": 3, "decode_rows": 1, "changes_phase": true, "seconds": 1}',
        '{"prefills": [3], "decode_rows": 0, "changes_phase": false, "seconds": 0}',
    ],
)
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=r"line 1: .* is no measured step .* expected prefills"):
        read_measured(file)
