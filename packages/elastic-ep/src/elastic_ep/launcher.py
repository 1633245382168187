"""Real processes on this host: started within milliseconds, cleaned up whatever dies."""

import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from elastic_ep.errors import LaunchError
from elastic_ep.links import Frames

START_PATIENCE = 120.0
"""Seconds for the imports of a nursery."""


class Launcher:
    """Forks processes off one nursery that imported ``modules``.

    ``ended`` is called in a thread of the launcher, and so without waiting for it, with the pid and exit
    code of each that ends (negative: the signal). ``environment`` is added to this process's.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        ended: Callable[[int, int], None],
    ) -> None:
        here, there = socket.socketpair()
        command = [sys.executable, "-m", "elastic_ep.nursery", str(there.fileno()), *modules]
        self._nursery = subprocess.Popen(
            command,
            pass_fds=[there.fileno()],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        there.close()
        self._frames = Frames(here)
        self._ended = ended
        self._lock = threading.Lock()
        self._alive: set[int] = set()
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="launcher", daemon=True)
        self._reader.start()
        self._started_one()

    def start(self, work: Callable[[], None]) -> int:
        """Run a picklable callable in a new process: its pid."""
        with self._lock:
            self._frames.send(pickle.dumps(work))
            return self._started_one()

    def kill(self, pid: int) -> None:
        """End a process of this launcher; ``ended`` follows."""
        if pid in self._alive:
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all processes."""
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
                kind, pid, code = pickle.loads(data)
                if kind == "ended":
                    self._alive.discard(pid)
                    self._ended(pid, code)
                    continue
                if kind == "started":
                    self._alive.add(pid)
                self._started.put(pid)
        self._started.put(0)
        for pid in list(self._alive):
            self._alive.discard(pid)
            self._ended(pid, -signal.SIGKILL)
