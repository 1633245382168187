import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_scheduler import Interleave, Phase, PhasePolicy, PrefillFirst, StepRecord, Work

works = st.builds(Work, decodes=st.integers(0, 2), chunks=st.integers(0, 1), admissible=st.integers(0, 1))
contested = Work(decodes=3, chunks=1, admissible=0)
quiet = Work(decodes=3, chunks=0, admissible=0)
steps = st.integers(1, 4)


def run(policy: PhasePolicy, work: Work, *, places: bool = True) -> Phase:
    """One step as a scheduler takes it: a prefill that places nothing becomes a decode, if there is one."""
    chosen = policy.choose(work).phase
    ran = Phase.DECODE if chosen is Phase.PREFILL and not places and work.decodes else chosen
    if ran is not Phase.EMPTY:
        policy.ran(StepRecord(ran), work)
    return chosen


def history_phase(history: str, prefill_steps: int, decode_steps: int, work: Work) -> Phase:
    """What interleaving means, read off the history: P and D are contested steps, d is an uncontested decode.

    Decodes are owed where the history ends in a full run of prefills that fewer contested decodes followed
    than were promised.
    """
    owed = re.search(f"P{{{prefill_steps}}}(d*D){{0,{decode_steps - 1}}}d*$", history)
    if work.decodes and (owed or not work.prefills):
        return Phase.DECODE
    return Phase.PREFILL if work.prefills else Phase.EMPTY


@given(steps, steps, st.lists(st.tuples(works, st.booleans()), max_size=60))
def test_interleave_agrees_with_the_history(n: int, m: int, days: list[tuple[Work, bool]]) -> None:
    policy, history = Interleave(n, m), ""
    for work, places in days:
        chosen = run(policy, work, places=places)
        assert chosen is history_phase(history, n, m, work)
        if not work.decodes:
            history = "" if work.prefills else history  # a prompt ran alone: nobody waited for a token
        elif chosen is Phase.PREFILL and places:
            history += "P"
        else:
            history += "D" if work.prefills else "d"
        assert not re.search(f"P{{{n + 1}}}", history), "too many contested prefills in a row"


@given(steps, steps)
def test_contested_steps_alternate_exactly(n: int, m: int) -> None:
    policy = Interleave(n, m)
    phases = [run(policy, contested) for _ in range(5 * (n + m))]
    assert phases == 5 * (n * [Phase.PREFILL] + m * [Phase.DECODE])


@given(steps, steps, st.lists(st.booleans(), max_size=40))
def test_neither_side_starves(n: int, m: int, placed: list[bool]) -> None:
    policy = Interleave(n, m)
    chosen = [run(policy, contested, places=places) for places in placed]
    decoded = [c is Phase.DECODE or not places for c, places in zip(chosen, placed, strict=True)]
    assert all(any(decoded[i : i + n + 1]) for i in range(len(placed) - n))
    assert all(Phase.PREFILL in chosen[i : i + m + 1] for i in range(len(placed) - m))


@given(steps, steps, st.integers(0, 50))
def test_a_quiet_decode_phase_charges_nothing(n: int, m: int, length: int) -> None:
    policy = Interleave(n, m)
    assert {run(policy, quiet) for _ in range(length)} <= {Phase.DECODE}
    assert [run(policy, contested) for _ in range(n)] == n * [Phase.PREFILL]


@given(steps, steps, st.integers(0, 50))
def test_a_quiet_decode_phase_pays_nothing_off(n: int, m: int, length: int) -> None:
    policy = Interleave(n, m)
    for work in n * [contested] + length * [quiet]:
        run(policy, work)
    assert [run(policy, contested) for _ in range(m + 1)] == m * [Phase.DECODE] + [Phase.PREFILL]


@given(steps, steps, st.integers(1, 4))
def test_a_prompt_alone_clears_what_was_owed(n: int, m: int, alone: int) -> None:
    policy = Interleave(n, m)
    for work in n * [contested] + alone * [Work(decodes=0, chunks=1, admissible=0)]:
        run(policy, work)
    assert [run(policy, contested) for _ in range(n)] == n * [Phase.PREFILL]


@pytest.mark.parametrize("policy", [Interleave(), PrefillFirst()])
@given(days=st.lists(st.tuples(works, st.booleans()), max_size=30))
def test_a_policy_chooses_only_what_can_run(policy: PhasePolicy, days: list[tuple[Work, bool]]) -> None:
    for work, places in days:
        possible = {Phase.PREFILL: work.chunks or work.admissible, Phase.DECODE: work.decodes}
        able = {phase for phase, count in possible.items() if count}
        assert run(policy, work, places=places) in (able or {Phase.EMPTY})


@given(works)
def test_prefill_first(work: Work) -> None:
    choice = PrefillFirst().choose(work)
    assert (choice.phase is Phase.PREFILL) == (work.chunks + work.admissible > 0)
    assert choice.prefill_tokens is None


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (-1, 1)])
def test_interleave_wants_at_least_one_step_of_each(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        Interleave(*counts)
