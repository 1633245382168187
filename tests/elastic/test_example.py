"""The example as its user runs it: it says how many steps it makes, and makes them while its size changes."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from elastic_ep.testing.toy_group import alive

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "elastic_group.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(lines: Iterator[str], start: str) -> str:
    """The first line that begins so."""
    return next(line for line in lines if line.startswith(start))


def descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in thread.joinpath("children").read_text().split()
    ]
    return children + [pid for child in children for pid in descendants(child)]


def test_it_grows_over_http_and_leaves_nothing() -> None:
    port = free_port()
    command = [sys.executable, str(EXAMPLE), "--port", str(port), "--ranks", "2", "--most", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as example:
        assert example.stdout is not None
        lines = iter(example.stdout)
        until(lines, "ranks [0, 1], epoch 1, ")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body, kind = json.dumps({"new_data_parallel_size": 3}), {"content-type": "application/json"}
        connection.request("POST", "/scale_elastic_ep", body, kind)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["ranks"] == [0, 1, 2]
        said = until(lines, "ranks [0, 1, 2], epoch 2, ")
        made = re.search(r"(\d+) steps", said)
        assert made is not None
        assert int(made[1]) > 0
        processes = descendants(example.pid)
        assert len(alive(processes)) == 5, "a nursery, a coordinator and three ranks"
        example.send_signal(signal.SIGINT)
        assert example.wait(60) == 0
    assert alive(processes) == []
    refused = subprocess.run([*command, "--ranks", "1"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "at least 2 ranks are needed" in refused.stderr
