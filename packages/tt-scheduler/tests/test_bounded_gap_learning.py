"""What measured steps teach a policy that bounds gaps."""

import attrs
from tt_scheduler import BoundedGap, Choice, Line, Phase, StepRecord, Work

SIZES = (128, 256, 512, 1024)
contested = Work(decodes=3, chunks=1, admissible=0)


def teach(policy: BoundedGap, tokens: int, chunk_s: float, decode_s: float = 0.1) -> None:
    """A chunk and a decode that take so long."""
    chunk, decode = StepRecord(Phase.PREFILL, tokens, 0), StepRecord(Phase.DECODE, 0, 3)
    for step, seconds in ((chunk, chunk_s), (decode, decode_s)):
        policy.ran(step, contested)
        policy.measured(step, seconds)


def test_one_program_compiled_on_first_use_does_not_spoil_the_estimate() -> None:
    policy = BoundedGap(1.0, SIZES, Line(0.0, 0.001), Line(0.1, 0.0))
    for seconds in (60.0, 0.128, 0.130, 0.127):
        for step, took in (
            (StepRecord(Phase.PREFILL, 128, 0), seconds),
            (StepRecord(Phase.DECODE, 0, 3), 0.1),
        ):
            policy.ran(step, contested)
            policy.measured(step, took)
    assert policy.choose(contested) == Choice(Phase.PREFILL, 512)


def test_quiet_decodes_do_not_hide_what_a_change_of_phase_costs() -> None:
    policy = BoundedGap(1.0, SIZES, Line(0.0, 0.001), Line(0.1, 0.0))
    teach(policy, 256, 0.256, decode_s=0.4)
    for _ in range(100):
        policy.ran(StepRecord(Phase.DECODE, 0, 3), attrs.evolve(contested, chunks=0))
        policy.measured(StepRecord(Phase.DECODE, 0, 3), 0.1)
    assert policy.choose(contested) == Choice(Phase.PREFILL, 512)
    assert policy.choose(attrs.evolve(contested, gap_s=0.1)) == Choice(Phase.PREFILL, 256)


def test_the_first_chunk_after_a_decode_learns_from_chunks_that_ran_alone() -> None:
    policy = BoundedGap(1.0, SIZES, Line(0.0, 0.0001), Line(0.1, 0.0))
    alone = Work(decodes=0, chunks=1, admissible=0)
    policy.ran(StepRecord(Phase.PREFILL, 1024, 0), alone)
    policy.measured(StepRecord(Phase.PREFILL, 1024, 0), 1.024)
    policy.ran(StepRecord(Phase.DECODE, 0, 3), contested)
    policy.measured(StepRecord(Phase.DECODE, 0, 3), 0.1)
    assert policy.choose(contested) == Choice(Phase.PREFILL, 512)


def test_a_device_that_gets_slower_is_followed() -> None:
    policy = BoundedGap(1.0, SIZES, Line(0.0, 0.001), Line(0.1, 0.0))
    for slow in (1, 3):
        for size in SIZES * 6:
            teach(policy, size, size * 0.001 * slow)
        assert policy.choose(contested).prefill_tokens == {1: 512, 3: 256}[slow]


def test_a_measured_step_that_it_was_not_told_of_teaches_nothing() -> None:
    policy = BoundedGap(1.0, SIZES, Line(0.0, 0.001), Line(0.1, 0.0))
    policy.measured(StepRecord(Phase.PREFILL, 128, 0), 1000.0)
    assert policy.choose(contested) == Choice(Phase.PREFILL, 512)
