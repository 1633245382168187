"""Where processes of a group find each other and what must outlive them: torch's TCPStore."""

import base64
from datetime import timedelta

import attrs
from torch.distributed import TCPStore  # type: ignore[attr-defined]

PATIENCE = timedelta(seconds=30)


@attrs.frozen
class Meeting:
    """The address of the store."""

    host: str
    port: int


class Rendezvous:
    """Values by key; `look` never waits for one that is not there."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    @classmethod
    def host(cls) -> "Rendezvous":
        """Opens a store on a free port of this host, which lives as long as this object."""
        return cls(TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False))

    @classmethod
    def join(cls, meeting: Meeting) -> "Rendezvous":
        return cls(TCPStore(meeting.host, meeting.port, None, False, PATIENCE, wait_for_workers=False))

    @property
    def meeting(self) -> Meeting:
        return Meeting(self._store.host, self._store.port)

    def publish(self, key: str, value: bytes) -> None:
        self._store.set(key, base64.b64encode(value).decode())

    def look(self, key: str) -> bytes | None:
        return base64.b64decode(self._store.get(key)) if self._store.check([key]) else None
