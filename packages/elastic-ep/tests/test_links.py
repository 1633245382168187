"""Frames and links: whole messages, in order, over connections that end and come again."""

import queue
import select
import socket
import threading
import time
from collections.abc import Iterator

import attrs
import pytest
from elastic_ep import Coordinator, OnLoss, Phase, Shape, WireError, encode, place, resize
from elastic_ep.codec import decode_any
from elastic_ep.links import Address, Frames, Link
from elastic_ep.rendezvous import Rendezvous
from elastic_ep.seat import find_director, publish_director
from hypothesis import given
from hypothesis import strategies as st

SECONDS = 20.0


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50))
def test_frames_come_whole_however_they_are_cut(messages: list[bytes], size: int) -> None:
    here, there = socket.socketpair()
    receiver = Frames(there)
    stream = b"".join(len(message).to_bytes(4) + message for message in messages)
    got: list[bytes] = []
    for start in range(0, len(stream), size):
        here.sendall(stream[start : start + size])
        received = receiver.receive()
        assert received is not None
        got += received
    assert got == messages
    here.close()
    assert receiver.receive() is None
    receiver.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)
        yield listener


def read(frames: Frames, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        assert select.select([frames], [], [], SECONDS)[0]
        received = frames.receive()
        assert received is not None
        found += received
    return found


def test_a_link_greets_first_beats_and_comes_back(listener: socket.socket) -> None:
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    address: Address = listener.getsockname()
    link = Link(lambda: address, lambda: (b"hello",), lambda: (b"beat",), heard.put, 0.01)
    assert not link.send(b"to nobody")
    link.start()
    for _ in range(2):
        frames = Frames(listener.accept()[0])
        assert read(frames, 3)[:3] == [b"hello", b"beat", b"beat"]
        frames.send(b"word")
        assert heard.get(timeout=SECONDS) == b"word"
        frames.close()
    link.close()


def test_a_link_survives_a_send_that_fails_elsewhere(listener: socket.socket) -> None:
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    beating, go_on = threading.Event(), threading.Event()

    def beat() -> tuple[bytes, ...]:
        beating.set()
        assert go_on.wait(SECONDS)
        return ()

    link = Link(listener.getsockname, tuple, beat, heard.put, 0.01)
    link.start()
    connection, _ = listener.accept()
    assert beating.wait(SECONDS)
    connection.close()
    while link.send(bytes(1 << 16)):
        time.sleep(0.001)
    go_on.set()
    frames = Frames(listener.accept()[0])
    frames.send(b"word")
    assert heard.get(timeout=SECONDS) == b"word"
    frames.close()
    link.close()


def test_what_is_published_is_found_elsewhere_and_nothing_is_waited_for() -> None:
    host = Rendezvous.host()
    other = Rendezvous.join(host.meeting)
    assert find_director(other) is None
    publish_director(host, ("127.0.0.1", 7))
    publish_director(host, ("127.0.0.1", 8))
    assert find_director(other) == ("127.0.0.1", 8)
    assert other.look("nothing") is None


@given(st.sampled_from(Phase), st.sampled_from(OnLoss), st.booleans())
def test_a_coordinators_state_survives_being_saved(phase: Phase, on_loss: OnLoss, busy: bool) -> None:
    plan = resize(place(Shape(layers=2, experts=4, slots=3, max_ranks=4), (0, 1)), (1, 2, 3))
    state = Coordinator(plan.before, "model", on_loss, phase=phase, cards=((1, b"\0card"),))
    if busy:
        state = attrs.evolve(state, stages=plan.stages, waiting=(1, 2), committing=4, why="so")
    data = encode(state, (Coordinator,))
    assert decode_any(data, (Coordinator,)) == state
    with pytest.raises(WireError, match="no message"):
        decode_any(encode(state, (Phase, Coordinator)), (Coordinator,))
