"""A joiner that prepares leaves the cores to those that serve."""

import os
import threading

import pytest
from elastic_ep.niceness import LOWEST, at_niceness


def priority() -> tuple[int, int]:
    """The scheduling policy and niceness of this thread."""
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("more", [0, 1, LOWEST])
def test_only_the_thread_that_makes_is_nice(more: int) -> None:
    before = policy, now = priority()
    niceness = min(now + more, LOWEST)
    assert at_niceness(niceness, priority) == (os.SCHED_IDLE if niceness == LOWEST else policy, niceness)
    assert priority() == before


def test_what_making_raises_comes_through() -> None:
    def fail() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        at_niceness(LOWEST, fail)


def test_where_no_priority_may_be_changed_that_is_said_and_zero_changes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError("not for you")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert at_niceness(0, lambda: "made") == "made"
    with pytest.raises(PermissionError, match="not for you"):
        at_niceness(5, lambda: "made")
