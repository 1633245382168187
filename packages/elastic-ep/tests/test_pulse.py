"""A rank is spoken for while its step gives signs of life, and between steps whatever it does."""

import attrs
import torch
from elastic_ep import Ballot, Counted, Hello, Lease, Patience, Seat, decode, join
from elastic_ep.pulse import Pulse, Voice
from elastic_ep.rendezvous import Meeting
from hypothesis import given
from hypothesis import strategies as st

PATIENCE = 10

events = st.lists(st.one_of(st.sampled_from(["enter", "beat", "leave"]), st.integers(1, 2 * PATIENCE)))


@given(events)
def test_a_step_without_a_sign_for_too_long_is_a_hang_and_nothing_else_is(history: list[str | int]) -> None:
    now = 0
    pulse = Pulse(PATIENCE, lambda: now)
    steps, silence = 0, 0
    for event in history:
        match event:
            case int():
                now += event
                silence += event
            case "enter" if not steps:
                pulse.__enter__()
                steps, silence = 1, 0
            case "beat" if steps:
                pulse.beat()
                silence = 0
            case "leave" if steps:
                pulse.__exit__()
                steps = 0
        assert pulse.lives == (not steps or silence <= PATIENCE)


def seat(stall: float, counting: float) -> Seat:
    return Seat(1, Ballot(1, 0), Meeting("here", 0), Patience(stall=stall), counting=counting)


def test_what_is_said_of_a_rank() -> None:
    member = attrs.evolve(join(Hello(1, 0, 1, "model", b"card")), serving=1, step=7)
    load = torch.tensor([[1, 2], [3, 4]])
    voice = Voice(seat(stall=1000, counting=1e-9))
    with voice.pulse:
        lease, hello, counted = map(decode, voice.beat(member, load))
    assert lease == Lease(1, 0, 1, 1, 7)
    assert isinstance(hello, Hello)
    assert isinstance(counted, Counted)
    assert torch.frombuffer(bytearray(counted.counts), dtype=torch.int64).tolist() == [1, 2, 3, 4]
    hung = Voice(seat(stall=-1, counting=1e-9))
    with hung.pulse:
        assert hung.beat(member, load) == []
    assert len(hung.beat(member, None)) == 2
