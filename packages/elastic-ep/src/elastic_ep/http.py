"""A group's size over HTTP, as an ASGI application for any server: alone, or mounted beside a model's API.

    POST   /scale_elastic_ep       {"new_data_parallel_size": 5} or {"ranks": [0, 2, 3]}
    DELETE /scale_elastic_ep       give up what is not committed yet
    GET    /elastic_ep             how the group is
    POST   /is_scaling_elastic_ep  the same in few words; GET too

The first and the last take and give what vLLM 0.33 does, and more: ``"wait": false`` answers 202 when the
operation runs, 409 says that another one does, and 500 how one failed that was rolled back. ``drain_timeout``
is how long, in seconds, a client waits for the end: 408 says that it goes on.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import attrs

from elastic_ep.control import Coordinator, Phase
from elastic_ep.errors import BusyError, GroupError, PlanError, UnfinishedError
from elastic_ep.group import Group

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Reply = tuple[int, dict[str, Any]]

MOST_BYTES = 65536
"""Of a request's body."""

DRAIN_TIMEOUT = 120
"""As vLLM has it."""


class BadRequestError(ValueError):
    """What a client sent cannot be; the message says what would be."""


@attrs.frozen
class Wanted:
    """What a client asks for: ranks, or how many."""

    ranks: tuple[int, ...] | None
    size: int
    seconds: int
    wait: bool


class Control:
    """The application. Whoever can reach it can change the group: serve it where only operators can."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._routes: dict[str, dict[str, Callable[[bytes], Reply]]] = {
            "/scale_elastic_ep": {"POST": self._scale, "DELETE": self._cancel},
            "/elastic_ep": {"GET": self._describe},
            "/is_scaling_elastic_ep": {"GET": self._is_scaling, "POST": self._is_scaling},
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"a {scope['type']} came to an application that only knows http")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        await _answer(send, *await self._reply(path, scope["method"], receive))

    async def _reply(self, path: str, method: str, receive: Receive) -> Reply:
        methods = self._routes.get(path)
        if methods is None:
            return refused(404, f"there is no {path}; there are {', '.join(self._routes)}")
        if method not in methods:
            return refused(405, f"{path} takes {' or '.join(methods)}, not {method}")
        try:
            body = await _body(receive)
            # In a thread: a coordinator that is being replaced answers late.
            return await asyncio.to_thread(methods[method], body)
        except BadRequestError as error:
            return refused(400, str(error))
        except GroupError as error:
            return refused(503, str(error))

    def _scale(self, body: bytes) -> Reply:
        wanted = read(body)
        deadline = time.monotonic() + wanted.seconds
        try:
            ranks = wanted.ranks or sized(self._group.state(), wanted.size)
            asked = self._group.start(ranks, wanted.seconds)
        except PlanError as error:
            return refused(400, str(error))
        except BusyError as error:
            return refused(409, str(error), since=error.since)
        if not wanted.wait:
            return 202, {"message": f"Scaling to {len(ranks)} data parallel engines", "ranks": ranks}
        try:
            self._group.finish(asked, deadline - time.monotonic())
        except UnfinishedError as error:
            return refused(408, f"{error}; it goes on, and /elastic_ep says how")
        except GroupError as error:
            return refused(500, f"{error}; the group serves on as before", epoch=self._group.state().epoch)
        return 200, {"message": f"Scaled to {len(ranks)} data parallel engines", "ranks": ranks}

    def _cancel(self, _: bytes) -> Reply:
        state = self._group.state()
        if state.operation is None:
            return refused(409, "nothing runs that could be given up")
        self._group.cancel()
        return 202, {"message": f"Giving up what runs, unless it is committed: the group {state.doing}"}

    def _describe(self, _: bytes) -> Reply:
        state = self._group.state()
        last = state.last
        return 200, {
            "epoch": state.epoch,
            "phase": state.phase.value,
            "ranks": state.placement.ranks,
            "serves": state.runs,
            "missing_experts": state.placement.missing(),
            "max_ranks": state.placement.shape.max_ranks,
            "doing": state.doing,
            "waiting_for": state.waiting,
            "leaving": state.gone,
            "since": None if state.operation is None else state.operation.since,
            "last": None if last is None else {"ok": last.ok, "why": last.why},
        }

    def _is_scaling(self, _: bytes) -> Reply:
        state = self._group.state()
        failed = state.last is not None and not state.last.ok
        phase = "failed" if failed else "idle" if state.last is None else "completed"
        scaling = state.operation is not None and not state.operation.yields
        if scaling:
            committing = state.phase in (Phase.COMMITTING, Phase.RETIRING)
            phase = "committing" if committing else "preparing"
        wanted = state.stages[-1].placement.ranks if scaling and state.stages else None
        return 200, {
            "is_scaling_elastic_ep": scaling,
            "phase": phase,
            "epoch": state.epoch,
            "error": state.last.why if state.last is not None and failed else None,
            "requested_data_parallel_size": None if wanted is None else len(wanted),
        }


def read(body: bytes) -> Wanted:
    """Of a request to scale. Raises BadRequestError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequestError(f"the body is no JSON object but {fields!r:.80}")
    known = ("new_data_parallel_size", "ranks", "drain_timeout", "wait")
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise BadRequestError(f"{unknown} are not known; there are {list(known)}")
    size, ranks = fields.get("new_data_parallel_size"), fields.get("ranks")
    if (size is None) == (ranks is None):
        raise BadRequestError("either new_data_parallel_size is required, or ranks")
    seconds, wait = fields.get("drain_timeout", DRAIN_TIMEOUT), fields.get("wait", True)
    for name, value in (("new_data_parallel_size", 1 if size is None else size), ("drain_timeout", seconds)):
        if type(value) is not int or value <= 0:
            raise BadRequestError(f"{name} must be a positive integer, not {value!r:.80}")
    if type(wait) is not bool:
        raise BadRequestError(f"wait must be true or false, not {wait!r:.80}")
    if ranks is not None and not (
        isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks)
    ):
        raise BadRequestError(f"ranks must be a list of integers, not {ranks!r:.80}")
    return Wanted(None if ranks is None else tuple(ranks), size or 0, seconds, wait)


def sized(state: Coordinator, size: int) -> tuple[int, ...]:
    """So many ranks: the highest leave, the lowest free ones join. Raises PlanError if there cannot be so
    many."""
    serving, most = state.placement.ranks, state.placement.shape.max_ranks
    free = sorted(set(range(most)) - set(serving), key=lambda rank: (rank in state.gone, rank))
    if size > most:
        raise PlanError(f"new_data_parallel_size {size} is too large: the group was made for {most} ranks")
    return tuple(sorted((*serving[:size], *free[: max(0, size - len(serving))])))


def refused(status: int, why: str, **more: Any) -> Reply:
    """An error as vLLM's servers give it."""
    return status, {"error": {"message": why, "type": "elastic_ep", "code": status, **more}}


async def _body(receive: Receive) -> bytes:
    """Raises BadRequestError if it is too long."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST_BYTES:
            raise BadRequestError(f"the body is longer than {MOST_BYTES} bytes")
    return body


async def _answer(send: Send, status: int, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    headers: Iterable[tuple[bytes, bytes]] = (
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    )
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})
