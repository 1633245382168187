"""Control messages between processes: frames over TCP, and the end of a link that finds its director again.

A frame is four bytes of length and that many bytes. Whatever is sent while nobody is connected is lost: both
machines say again what matters.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable

RETRY = 0.02
"""Seconds between tries to connect."""

SEND_PATIENCE = 1.0
"""Seconds that a full socket is waited for before the connection is given up."""

Address = tuple[str, int]


class Frames:
    """One connection. Not blocked for long by a peer that does not read."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self._lock = threading.Lock()
        connection.settimeout(SEND_PATIENCE)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, data: bytes) -> None:
        """OSError if the connection is lost or full for too long."""
        with self._lock:
            self._connection.sendall(len(data).to_bytes(4) + data)

    def receive(self) -> list[bytes] | None:
        """The frames that are complete by now; None at the end. Call when there is something to read."""
        try:
            data = self._connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            return None
        self._rest += data
        found = []
        while len(self._rest) >= 4 and len(self._rest) >= 4 + (size := int.from_bytes(self._rest[:4])):
            found.append(self._rest[4 : 4 + size])
            self._rest = self._rest[4 + size :]
        return found

    def shut(self) -> None:
        """End both directions; the other side sees it, and `receive` here too."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


class Link:
    """A thread that keeps a connection to whoever ``find`` gives the address of.

    On each new connection it says what ``greet`` gives, and ``beat`` every ``every`` seconds. ``deliver``
    gets each frame that comes, in this thread.
    """

    def __init__(
        self,
        find: Callable[[], Address | None],
        greet: Callable[[], Iterable[bytes]],
        beat: Callable[[], Iterable[bytes]],
        deliver: Callable[[bytes], None],
        every: float,
    ) -> None:
        self._find = find
        self._greet = greet
        self._beat = beat
        self._deliver = deliver
        self._every = every
        self._frames: Frames | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, data: bytes) -> bool:
        """Whether it was handed to a connection."""
        frames = self._frames
        if frames is None:
            return False
        try:
            frames.send(data)
        except OSError:
            frames.shut()  # the link's thread may be reading: it closes what it opened
            return False
        return True

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._closed.is_set():
            frames = self._connect()
            if frames is None:
                self._closed.wait(RETRY)
            else:
                self._serve(frames)
                self._frames = None
                frames.close()

    def _connect(self) -> Frames | None:
        address = self._find()
        if address is None:
            return None
        try:
            frames = Frames(socket.create_connection(address, timeout=SEND_PATIENCE))
        except OSError:
            return None
        try:
            for data in self._greet():
                frames.send(data)
        except OSError:
            frames.close()
            return None
        self._frames = frames
        return frames

    def _serve(self, frames: Frames) -> None:
        due = time.monotonic()
        while not self._closed.is_set():
            now = time.monotonic()
            if now >= due:
                for data in self._beat():
                    self.send(data)
                due = now + self._every
            if not select.select([frames], [], [], max(0.0, due - now))[0]:
                continue
            received = frames.receive()
            if received is None:
                return
            for data in received:
                self._deliver(data)
