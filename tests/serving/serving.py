"""Start `vllm serve` as a user would, wait until it answers, and end it by its process id."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
BUNDLES = ROOT / "examples/models"
SERVE_SMOLLM2 = [sys.executable, str(ROOT / "examples" / "serve_smollm2.py")]
VLLM_SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
MODEL = "SmolLM2-135M-Instruct"
STARTS_WITHIN_S = 480  # many processes on a busy machine
ENDS_WITHIN_S = 60


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment for a server on the host mesh; a change to None removes a variable."""
    wanted: dict[str, str | None] = {
        "MESH_DEVICE": "host",
        "EXTRA_MODELS_DIR": str(BUNDLES / "torch-llama"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PROMETHEUS_MULTIPROC_DIR": None,  # else the server would go on counting in the folder of these tests
        **changes,
    }
    kept = {name: value for name, value in os.environ.items() if name not in wanted}
    return kept | {name: value for name, value in wanted.items() if value is not None}


@attrs.frozen
class Server:
    """A running server. Its process leads a group of its own, as a job in a terminal does."""

    process: "subprocess.Popen[bytes]" = attrs.field(repr=False)
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def healthy(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        samples = (line for line in self.get("/metrics").splitlines() if line.startswith(name + "{"))
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def members(self) -> list[int]:
        """The processes of the server's group that have not ended."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == self.process.pid and state != "Z":
                found.append(int(stat.parent.name))
        return found

    def press_ctrl_c(self) -> None:
        """What a terminal does: an interrupt to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def running(
    command: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run `command` on a free port until the block is left, with its output in `folder`/server.log."""
    port = _free_port()
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=environment() if environ is None else environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _end(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not server.healthy():
        ended = server.process.poll()
        assert ended is None, f"the server ended with {ended}:\n{tail(server.log)}"
        assert time.monotonic() < deadline, f"no answer in {STARTS_WITHIN_S} s:\n{tail(server.log)}"
        time.sleep(0.2)


def _end(server: Server) -> None:
    if server.process.poll() is None:
        server.process.terminate()
        try:
            server.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
    for straggler in server.members():
        os.kill(straggler, signal.SIGKILL)
    server.process.wait()


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
