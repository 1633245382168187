"""A group's size over HTTP, as an ASGI application for any server: alone, or mounted beside a model's API.

    POST   /scale_elastic_ep       {"new_data_parallel_size": 5} or {"ranks": [0, 2, 3]}
    DELETE /scale_elastic_ep       give up what is not committed yet
    GET    /elastic_ep             how the group is
    POST   /is_scaling_elastic_ep  the same in few words; GET too

The first and the last take and give what vLLM 0.33 does, and more: with ``"wait": false`` 202 says that the
operation runs. 400: it cannot be; 409: another runs; 500: it failed, and how the group is now; 503: no
coordinator answers. ``drain_timeout`` is how long, in seconds, the client waits: 408 says that it goes on.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from elastic_ep.control import Coordinator, Phase
from elastic_ep.coordinator import UNCOMMITTED
from elastic_ep.errors import BusyError, GroupError, PlanError, RequestError, UnfinishedError
from elastic_ep.group import Group
from elastic_ep.http_request import read

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Reply = tuple[int, dict[str, Any]]

MOST_BYTES = 65536
"""Of a request's body."""

SLICE = 0.5
"""Seconds that a thread waits at a time, so that a server that ends need not wait longer."""


class Control:
    """The application. Whoever can reach it can change the group: serve it where only operators can."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._routes: dict[str, dict[str, Callable[[bytes], Awaitable[Reply]]]] = {
            "/scale_elastic_ep": {"POST": self._scale, "DELETE": self._cancel},
            "/elastic_ep": {"GET": self._describe},
            "/is_scaling_elastic_ep": {"GET": self._is_scaling, "POST": self._is_scaling},
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"a {scope['type']} came to an application that only knows http")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        methods = self._routes.get(path)
        if methods is None:
            reply = refused(404, f"there is no {path}; there are {', '.join(self._routes)}")
        elif scope["method"] not in methods:
            reply = refused(405, f"{path} takes {' or '.join(methods)}, not {scope['method']}")
        else:
            try:
                body = await _body(scope, receive)
                reply = await methods[scope["method"]](body)
            except (RequestError, PlanError) as error:
                reply = refused(400, str(error))
            except BusyError as error:
                reply = refused(409, str(error), since=error.since)
            except GroupError as error:
                reply = refused(503, str(error))
        await _answer(send, *reply)

    async def _scale(self, body: bytes) -> Reply:
        wanted = read(body)
        deadline = time.monotonic() + wanted.seconds
        ranks = wanted.target(await self._state())
        asked = await asyncio.to_thread(self._group.start, ranks, wanted.seconds)
        told = f"{len(ranks)} data parallel engines"
        if not wanted.wait:
            return 202, {"message": f"Scaling to {told}", "ranks": ranks}
        while True:
            left = deadline - time.monotonic()
            try:
                await asyncio.to_thread(self._group.finish, asked, min(SLICE, left))
            except UnfinishedError as error:
                if left <= SLICE:
                    return refused(408, f"{error}; it goes on, and /elastic_ep says how")
            except GroupError as error:
                state = await self._state()
                return refused(500, f"{error}; now {_now(state)}", epoch=state.epoch)
            else:
                return 200, {"message": f"Scaled to {told}", "ranks": ranks}

    async def _cancel(self, _: bytes) -> Reply:
        state = await self._state()
        if state.next is None and state.phase not in UNCOMMITTED:
            return refused(409, f"there is nothing to give up: {_now(state)}")
        await asyncio.to_thread(self._group.cancel)
        return 202, {"message": f"Giving up, unless it is committed meanwhile: the group {state.doing}"}

    async def _describe(self, _: bytes) -> Reply:
        state = await self._state()
        serving, last = state.placement.ranks, state.last
        goal = state.stages[-1].placement.ranks if state.stages else serving
        return 200, {
            "epoch": state.epoch,
            "phase": state.phase.value,
            "ranks": serving,
            "joining": sorted(set(goal) - set(serving)),
            "leaving": sorted(set(serving) - set(goal)),
            "ending": state.gone,
            "complete": state.runs,
            "missing_experts": state.placement.missing(),
            "max_ranks": state.placement.shape.max_ranks,
            "doing": state.doing,
            "waiting_for": state.waiting,
            "since": None if state.operation is None else state.operation.since,
            "last": None if last is None else {"ok": last.ok, "why": last.why},
        }

    async def _is_scaling(self, _: bytes) -> Reply:
        state = await self._state()
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

    async def _state(self) -> Coordinator:
        """In a thread: it is asked of a store."""
        return await asyncio.to_thread(self._group.state)


def refused(status: int, why: str, **more: Any) -> Reply:
    """An error as vLLM's servers give it."""
    return status, {"error": {"message": why, "type": "elastic_ep", "code": status, **more}}


def _now(state: Coordinator) -> str:
    serves = "serve" if state.runs else f"wait for experts {list(state.placement.missing())}"
    return f"ranks {list(state.placement.ranks)} {serves} in epoch {state.epoch}"


async def _body(scope: Message, receive: Receive) -> bytes:
    """Raises RequestError if it is too long, or something else than JSON, as a page in an operator's browser
    could send."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST_BYTES:
            raise RequestError(f"the body is longer than {MOST_BYTES} bytes")
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if body and kind.split(b";")[0].strip().lower() != b"application/json":
        raise RequestError(f"the body must be application/json, not {kind.decode('latin-1')!r:.80}")
    return body


async def _answer(send: Send, status: int, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
