"""Real processes on this host: started within milliseconds, cleaned up whatever dies."""

import collections
import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from elastic_ep.errors import LaunchError
from elastic_ep.links import Frames

START_PATIENCE = 120.0
"""Seconds for the imports of a nursery."""

POLL = 0.005
"""Seconds between looks whether processes have ended."""

WARM = ("elastic_ep.process", "elastic_ep.director")
"""What every group's processes import."""

Ended = Callable[[int, int], None]
"""Called with the process id and exit code of a process that has ended; negative: the signal."""


class Launcher:
    """Forks processes off one nursery that has imported ``modules``, and called the function that follows
    the colon in ``module:function``. Several groups may share one.

    ``environment`` is added to this process's. All processes end with `close`, or with this process.
    """

    def __init__(self, modules: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> None:
        here, there = socket.socketpair()
        command = [sys.executable, "-m", "elastic_ep.nursery", str(there.fileno()), *WARM, *modules]
        self._nursery = subprocess.Popen(
            command,
            pass_fds=[there.fileno()],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        there.close()
        self._frames = Frames(here)
        self._lock = threading.Lock()
        self._starting: collections.deque[Ended] = collections.deque()
        self._alive: dict[int, Ended] = {}
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="launcher", daemon=True)
        self._reader.start()
        self._started_one()

    @property
    def nursery(self) -> int:
        """Process id of the nursery."""
        return self._nursery.pid

    def start(self, work: Callable[[], None], ended: Ended) -> int:
        """Run a picklable callable in a new process: its pid.

        ``ended`` is called in a thread that must not be held up. LaunchError if there is no nursery.
        """
        with self._lock:
            self._starting.append(ended)
            try:
                self._frames.send(pickle.dumps(work))
            except OSError as error:
                raise LaunchError(f"the nursery has ended: {error}") from error
            return self._started_one()

    def kill(self, pid: int, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process of this launcher; ``ended`` follows."""
        if pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)

    def end(self, pids: Iterable[int], seconds: float) -> None:
        """Ask processes to end by SIGTERM, and kill those that have not after so many seconds; return when
        none is left."""
        pids = set(pids)
        for how in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                self.kill(pid, how)
            deadline = time.monotonic() + seconds
            while pids & self._alive.keys() and time.monotonic() < deadline:
                time.sleep(POLL)

    def close(self) -> None:
        """End all processes."""
        if self._reader.is_alive():
            self._frames.shut()
        self._nursery.wait(START_PATIENCE)
        self._reader.join(START_PATIENCE)
        self._frames.close()

    def _started_one(self) -> int:
        try:
            pid = self._started.get(timeout=START_PATIENCE)
        except queue.Empty:
            raise LaunchError(f"no process started within {START_PATIENCE} s") from None
        if pid == 0:
            raise LaunchError(f"the nursery has ended; its exit code is {self._nursery.poll()}")
        return pid

    def _read(self) -> None:
        while True:
            select.select([self._frames], [], [])
            received = self._frames.receive()
            if received is None:
                break
            for data in received:
                self._heard(*pickle.loads(data))
        self._started.put(0)
        for pid, ended in list(self._alive.items()):
            ended(pid, -signal.SIGKILL)
        self._alive.clear()

    def _heard(self, kind: str, pid: int, code: int) -> None:
        if kind == "ended":
            self._alive.pop(pid)(pid, code)
            return
        if kind == "started":
            self._alive[pid] = self._starting.popleft()
        self._started.put(pid)


def is_dying(pid: int) -> bool:
    """Whether a process has no memory any more, so that it will neither speak nor write: that is so some time
    before it has ended, which on a busy host is worth knowing."""
    try:
        return Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except (FileNotFoundError, ProcessLookupError):
        return True
