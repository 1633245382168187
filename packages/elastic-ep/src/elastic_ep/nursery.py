"""A process that has imported what takes long, and forks children that start at once.

It is started by `elastic_ep.launcher` as ``python -m elastic_ep.nursery FD MODULE[:FUNCTION]...`` and
obeys the socket FD. It holds no agents, no threads and no tensors: those do not survive a fork. Its children
die with it, and it ends when the socket does, so nothing outlives whoever started it, whatever dies first.
"""

import ctypes
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable

from elastic_ep.links import Frames

PR_SET_PDEATHSIG = 1


def main(fd: int, modules: list[str]) -> None:
    """Serve until the socket ends."""
    frames = Frames(socket.socket(fileno=fd))
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.freeze()
    _say(frames, "ready", os.getpid(), 0)
    selector = selectors.DefaultSelector()
    selector.register(frames, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fileobj)
                _bury(frames, key.fd, key.data)
                continue
            received = frames.receive()
            if received is None:
                os._exit(0)
            for data in received:
                child = _fork(frames, data)
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, child)


def _say(frames: Frames, kind: str, pid: int, code: int) -> None:
    try:
        frames.send(pickle.dumps((kind, pid, code)))
    except OSError:
        os._exit(0)


def _bury(frames: Frames, descriptor: int, child: int) -> None:
    os.close(descriptor)
    _, status = os.waitpid(child, 0)
    _say(frames, "ended", child, os.waitstatus_to_exitcode(status))


def _fork(frames: Frames, data: bytes) -> int:
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        frames.close()
        _live(data)
    _say(frames, "started", child, 0)
    return child


def _live(data: bytes) -> None:
    """Run what was asked for and end without cleaning up: destructors of agents may hang."""
    code = 1
    try:
        work: Callable[[], None] = pickle.loads(data)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the end of a process: say why
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
