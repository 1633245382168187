"""Messages survive the wire, and nothing else comes out of it."""

import zlib

import attrs
import pytest
from elastic_ep import (
    COORDINATOR,
    MESSAGES,
    Ballot,
    Fence,
    Lease,
    Message,
    Placement,
    Prepare,
    Resume,
    Shape,
    Stage,
    Suspect,
    WireError,
    decode,
    encode,
    nobody,
    place,
    resize,
    stale,
)
from hypothesis import given, settings
from hypothesis import strategies as st

PLACEMENT = place(Shape(layers=2, experts=3, slots=2, max_ranks=3), [0, 2])
STAGE = resize(PLACEMENT, [1, 2]).stages[0]
RELOAD = resize(nobody(PLACEMENT.shape), [0, 1]).stages[0]


def messages() -> st.SearchStrategy[Message]:
    st.register_type_strategy(Placement, st.just(PLACEMENT))
    st.register_type_strategy(Stage, st.sampled_from([STAGE, RELOAD]))
    return st.one_of([st.from_type(kind) for kind in MESSAGES])


@settings(max_examples=200, deadline=None)
@given(messages())
def test_every_message_comes_back_equal(message: Message) -> None:
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)


def test_all_messages_have_a_code() -> None:
    def leaves(kind: type[Message]) -> set[type[Message]]:
        return {kind}.union(*(leaves(child) for child in kind.__subclasses__()))

    abstract = {kind for kind in leaves(Message) if kind.__subclasses__()}
    assert leaves(Message) - abstract == set(MESSAGES)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@settings(deadline=None)
@given(st.data())
def test_damaged_messages_are_no_messages(data: st.DataObject) -> None:
    whole = encode(Prepare(3, 0, COORDINATOR, STAGE, ((1, b"card"),)))
    at = data.draw(st.integers(0, len(whole) - 1))
    for bit in range(8):
        damaged = bytes([*whole[:at], whole[at] ^ 1 << bit, *whole[at + 1 :]])
        for broken in (damaged, whole[:at], whole + b"x"):
            with pytest.raises(WireError):
                decode(broken)


@pytest.mark.parametrize(
    "body",
    [
        "[4,[1,0,0]]",
        '[4,[1,0,0,"dead"]]',
        "[4,[1,0,0,[true]]]",
        "[4,[1,0,0,[1],2]]",
        "[99,[1,0,0]]",
        "[-1.5,[1,0,0]]",
        '[6,[1,0,0,"f","no base64!"]]',
        "[5,[1,0,0,[[1,2,1,1],[0],[[0,1]]],4]]",
        "{}",
        "[]",
    ],
)
def test_well_formed_bytes_of_other_content_are_no_messages(body: str) -> None:
    packed = zlib.compress(body.encode())
    with pytest.raises(WireError):
        decode(b"\x01" + zlib.crc32(packed).to_bytes(4) + packed)


def test_the_checks_above_are_not_about_the_envelope() -> None:
    packed = zlib.compress(b"[4,[1,0,-1,[2]]]")
    assert decode(b"\x01" + zlib.crc32(packed).to_bytes(4) + packed) == Fence(1, 0, COORDINATOR, (2,))


def test_another_version_is_named() -> None:
    with pytest.raises(WireError, match=r"b'\\x02'; this version reads messages that start with 1"):
        decode(b"\x02" + encode(Fence(1, 0, COORDINATOR, ()))[1:])


def test_a_large_placement_is_compact() -> None:
    large = place(Shape(layers=6, experts=256, slots=16, max_ranks=32), range(20))
    assert len(encode(Resume(7, 0, COORDINATOR, large, 1234, True))) < 6 * 20 * 16 * 2


def test_staleness() -> None:
    fence = Fence(3, 1, COORDINATOR, ())
    ballots = [Ballot(2, 9), Ballot(3, 0), Ballot(3, 1), Ballot(3, 2), Ballot(4, 0)]
    assert [stale(fence, ballot, 2) for ballot in ballots] == [False, False, False, True, True]
    lease = Lease(2, 0, 5, serving=2, step=7)
    assert not stale(lease, Ballot(3, 0), 2)
    assert stale(Suspect(2, 0, 5, serving=1, step=7, rank=3, why=""), Ballot(2, 0), 2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        lease.step = 8  # type: ignore[misc]
