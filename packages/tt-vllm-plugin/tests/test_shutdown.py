"""Signals that tell an engine to end."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from vllm_tt_plugin.shutdown import first_only, uninterrupted
from vllm_tt_plugin.worker import TTWorker

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in BOTH}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_is_not_interrupted_by_itself() -> None:
    """As vLLM's would be, by a SIGTERM that comes while it holds the lock of an event."""
    lock, calls = threading.Lock(), []

    def handler(signum: int, _: FrameType | None) -> None:
        assert lock.acquire(blocking=False), "it would wait for itself"
        calls.append(signum)
        signal.raise_signal(signal.SIGTERM)
        lock.release()

    signal.signal(signal.SIGTERM, first_only(handler))
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert calls == [signal.SIGTERM]


def test_closing_goes_on_when_told_to_end_again() -> None:
    heard: list[int] = []
    for number in BOTH:
        signal.signal(number, lambda signum, _: heard.append(signum))
    with uninterrupted():
        for number in BOTH:
            signal.raise_signal(number)
    assert not heard
    for number in BOTH:
        signal.raise_signal(number)
    assert heard == list(BOTH)


def test_a_worker_closes_its_mesh_undisturbed() -> None:
    class Closing:
        closed = False

        def close(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            self.closed = True

    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("interrupted"))
    worker: Any = object.__new__(TTWorker)  # the rest of it needs a server
    worker._mesh = mesh = Closing()
    worker.shutdown()
    assert mesh.closed


def test_another_thread_may_close_too() -> None:
    def close() -> bool:
        with uninterrupted():
            return True

    before = [signal.getsignal(number) for number in BOTH]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(close).result()
    assert [signal.getsignal(number) for number in BOTH] == before
