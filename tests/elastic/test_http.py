"""A group's size over HTTP: a real server, a real group, and clients as vLLM's users write them."""

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import uvicorn
from elastic_ep import Group, Launcher, Patience, Phase, Shape
from elastic_ep.http import MOST_BYTES, Control
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_group import SlowCapture, ToyGroup

SHAPE = Shape(layers=5, experts=6, slots=4, max_ranks=4)
CONFIG = ToyConfig(SHAPE, tokens=4, hidden=8, pace=0.02)
SECONDS = 60.0


@attrs.frozen
class Client:
    """Of a server that controls ``group``; a joiner takes some seconds to prepare."""

    group: Group
    port: int

    def ask(
        self, method: str, path: str, fields: object = None, kind: str = "application/json"
    ) -> tuple[int, dict[str, Any]]:
        body = fields if isinstance(fields, bytes) else b"" if fields is None else json.dumps(fields).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        connection.request(method, path, body, {"content-type": kind})
        response = connection.getresponse()
        found = response.status, json.loads(response.read())
        connection.close()
        return found

    def scale(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        return self.ask("POST", "/scale_elastic_ep", fields)

    def describe(self) -> dict[str, Any]:
        status, found = self.ask("GET", "/elastic_ep")
        assert status == 200
        return found

    def rest(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while (found := self.describe())["phase"] != "stable" or found["ending"]:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found


@pytest.fixture(scope="module")
def client(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    toy = ToyGroup.start(
        launcher, CONFIG, tmp_path_factory.mktemp("ranks"), Patience(lease=10.0), SlowCapture
    )
    server = uvicorn.Server(uvicorn.Config(Control(toy.group), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Client(toy.group, server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join()
    toy.group.close()


@pytest.fixture
def two(client: Client) -> Client:
    """Ranks 0 and 1 serve, and nothing else happens."""
    client.rest()
    status, told = client.scale(ranks=[0, 1])
    assert status == 200, told
    return client


def test_as_vllm_has_it(two: Client) -> None:
    status, told = two.scale(new_data_parallel_size=3, drain_timeout=60)
    assert (status, told["message"]) == (200, "Scaled to 3 data parallel engines")
    assert two.describe()["ranks"] == [0, 1, 2]
    for method in ("POST", "GET"):
        assert two.ask(method, "/is_scaling_elastic_ep") == (
            200,
            {
                "is_scaling_elastic_ep": False,
                "phase": "completed",
                "epoch": two.group.state().epoch,
                "error": None,
                "requested_data_parallel_size": None,
            },
        )
    assert two.scale(new_data_parallel_size=3)[0] == 200, "it is that large already"
    assert two.scale(new_data_parallel_size=2)[1]["ranks"] == [0, 1]


def test_what_runs_can_be_watched_refuses_another_and_can_be_given_up(two: Client) -> None:
    """Case 44, and no request waits for another: case 43."""
    epoch = two.describe()["epoch"]
    status, told = two.scale(new_data_parallel_size=4, wait=False)
    assert (status, told["ranks"]) == (202, [0, 1, 2, 3])
    _, scaling = two.ask("POST", "/is_scaling_elastic_ep")
    assert scaling == {
        "is_scaling_elastic_ep": True,
        "phase": "preparing",
        "epoch": epoch,
        "error": None,
        "requested_data_parallel_size": 4,
    }
    status, told = two.scale(ranks=[0, 1, 2])
    assert (status, told["error"]["code"]) == (409, 409)
    assert told["error"]["since"] == two.describe()["since"]
    found = two.describe()
    assert found["doing"] == "goes from ranks [0, 1] to [0, 1, 2, 3]"
    assert (found["joining"], found["leaving"]) == ([2, 3], [])
    assert two.ask("DELETE", "/scale_elastic_ep")[0] == 202
    found = two.rest()
    assert (found["ranks"], found["epoch"], found["complete"]) == ([0, 1], epoch, True)
    assert found["last"] == {"ok": False, "why": "cancelled"}
    assert two.ask("POST", "/is_scaling_elastic_ep")[1]["error"] == "cancelled"
    status, told = two.ask("DELETE", "/scale_elastic_ep")
    assert (status, told["error"]["message"]) == (
        409,
        f"there is nothing to give up: ranks [0, 1] serve in epoch {epoch}",
    )


def test_a_client_that_waits_no_longer_is_told_that_it_goes_on(two: Client) -> None:
    status, told = two.scale(new_data_parallel_size=3, drain_timeout=1)
    assert status == 408
    assert "the phase is" in told["error"]["message"]
    assert "it goes on" in told["error"]["message"]
    two.rest()
    assert two.describe()["ranks"] == [0, 1, 2]


def test_why_it_failed_is_told_and_the_group_serves_on(two: Client) -> None:
    epoch, answers = two.describe()["epoch"], list[tuple[int, dict[str, Any]]]()
    asking = threading.Thread(target=lambda: answers.append(two.scale(ranks=[0, 1, 3])))
    asking.start()
    two.group.wait_for(Phase.PREPARING, SECONDS)
    os.kill(two.group.pids[3], signal.SIGKILL)
    asking.join()
    [(status, told)] = answers
    assert (status, told["error"]["epoch"]) == (500, epoch)
    assert re.search(rf"rank 3 died.*; now ranks \[0, 1\] serve in epoch {epoch}", told["error"]["message"])
    assert two.rest()["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        ([3], "no JSON object"),
        ({}, "either new_data_parallel_size is required, or ranks"),
        ({"new_data_parallel_size": 3, "ranks": [0]}, "either"),
        ({"new_data_parallel_size": 0}, "must be a positive integer, not 0"),
        ({"new_data_parallel_size": True}, "must be a positive integer, not True"),
        ({"new_data_parallel_size": 3, "drain_timeout": 1.5}, "drain_timeout must be a positive integer"),
        ({"new_data_parallel_size": 3, "drain_timeout": 10**400}, "drain_timeout must .* at most 86400"),
        ({"new_data_parallel_size": 3, "wait": 1}, "wait must be true or false"),
        ({"new_data_parallel_size": 5}, "the group was made for 4 ranks"),
        ({"new_data_parallel_size": 1}, "4 slots"),
        ({"ranks": []}, "ranks must be a list of integers"),
        ({"ranks": [0, 9]}, "must lie between 0 and 3"),
        ({"ranks": [0, 0]}, "must be ascending and distinct"),
        ({"new_data_parallel_size": 3, "drain_timout": 9}, r"\['drain_timout'\] are not known"),
        (b"[" * (MOST_BYTES + 1), "longer than"),
        (b"[" * MOST_BYTES, "no JSON"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(client: Client, fields: object, why: str) -> None:
    before = client.rest()
    status, told = client.ask("POST", "/scale_elastic_ep", fields)
    assert (status, told["error"]["code"]) == (400, 400), told
    assert re.search(why, told["error"]["message"]), told
    assert client.describe() == before


def test_a_page_in_a_browser_can_change_nothing(client: Client) -> None:
    """It may post text anywhere, but JSON only where it was asked for."""
    before = client.rest()
    status, told = client.ask("POST", "/scale_elastic_ep", {"ranks": [0, 1, 2]}, kind="text/plain")
    assert (status, told["error"]["message"]) == (400, "the body must be application/json, not 'text/plain'")
    assert client.describe() == before


def test_other_paths_and_methods(client: Client) -> None:
    assert client.ask("GET", "/")[0] == 404
    status, told = client.ask("GET", "/scale_elastic_ep")
    assert (status, told["error"]["message"]) == (405, "/scale_elastic_ep takes POST or DELETE, not GET")
