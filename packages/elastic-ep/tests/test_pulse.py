"""A rank is spoken for while its serving thread gives signs of life."""

import attrs
import torch
from elastic_ep import Ballot, Counted, Hello, Lease, Patience, Seat, decode, join
from elastic_ep.pulse import Pulse, Voice
from elastic_ep.rendezvous import Meeting
from hypothesis import given
from hypothesis import strategies as st

PATIENCE = 10

events = st.lists(
    st.one_of(
        st.just("beat"),
        st.integers(0, 3 * PATIENCE).map(lambda seconds: ("beat", seconds)),
        st.integers(1, 2 * PATIENCE).map(lambda seconds: ("pass", seconds)),
    )
)


@given(events)
def test_who_gave_no_sign_for_as_long_as_the_last_one_said_hangs_and_nobody_else(
    history: list[str | tuple[str, int]],
) -> None:
    now = 0
    pulse = Pulse(PATIENCE, lambda: now)
    silence, expected = 0, 10**9
    for event in history:
        match event:
            case "beat":
                pulse.beat()
                silence, expected = 0, PATIENCE
            case ("beat", seconds):
                pulse.beat(int(seconds))
                silence, expected = 0, int(seconds)
            case (_, seconds):
                now += int(seconds)
                silence += int(seconds)
        assert pulse.lives == (silence <= expected)


def seat(stall: float, counting: float) -> Seat:
    return Seat(1, Ballot(1, 0), Meeting("here", 0), Patience(stall=stall, give_up=10_000), counting=counting)


def test_what_is_said_of_a_rank() -> None:
    member = attrs.evolve(join(Hello(1, 0, 1, "model", b"card")), serving=1, step=7)
    load = torch.tensor([[1, 2], [3, 4]])
    voice = Voice(seat(stall=1000, counting=1e-9))
    voice.pulse.beat()
    lease, hello, counted = map(decode, voice.beat(member, load))
    assert lease == Lease(1, 0, 1, 1, 7)
    assert isinstance(hello, Hello)
    assert isinstance(counted, Counted)
    assert torch.frombuffer(bytearray(counted.counts), dtype=torch.int64).tolist() == [1, 2, 3, 4]
    hung = Voice(seat(stall=-1, counting=1e-9))
    assert len(hung.beat(member, None)) == 2, "it has not begun to serve"
    hung.pulse.beat()
    assert hung.beat(member, load) == []
    hung.pulse.beat(1000)
    assert len(hung.beat(member, None)) == 2
