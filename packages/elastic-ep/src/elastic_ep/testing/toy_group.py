"""Groups of real processes that serve the toy model over NIXL, and what they saw."""

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from elastic_ep.balancer import Balancer
from elastic_ep.control import Coordinator, OnLoss, Phase
from elastic_ep.errors import GroupError
from elastic_ep.group import Group
from elastic_ep.launcher import Launcher
from elastic_ep.process import run_rank
from elastic_ep.runner import EagerRunner, Program, Runner
from elastic_ep.seat import Patience
from elastic_ep.testing.toy import ToyConfig, ToyService
from elastic_ep.transport import Op, Span, Transport
from elastic_ep.transport_nixl import NixlTransport

ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "WARN"}
"""Loopback only, and one thread a process: ranks share the cores."""

Record = dict[str, Any]


class SlowCapture(EagerRunner):
    """Takes a while to capture, as compilers do."""

    def _record(self, program: Program) -> Program:
        time.sleep(0.1)
        return program


class SlowReads(NixlTransport):
    """Takes a while to begin a read, as large experts take to copy."""

    def read(self, peer: str, spans: Iterable[Span]) -> Op:
        time.sleep(0.1)
        return super().read(peer, spans)


@attrs.frozen
class ToyGroup:
    """A group and the folder that its ranks write to."""

    group: Group
    folder: Path

    @classmethod
    def start(
        cls,
        launcher: Launcher,
        config: ToyConfig,
        folder: Path,
        patience: Patience = Patience(),  # noqa: B008 - frozen
        make_runner: Callable[[], Runner] = EagerRunner,
        auto_commit: bool = True,
        niceness: int = 0,
        run: Callable[..., None] = run_rank,
        on_loss: OnLoss = OnLoss.RELOAD,
        balancer: Balancer | None = None,
        make_transport: Callable[[str], Transport] = NixlTransport,
    ) -> "ToyGroup":
        config = attrs.evolve(config, log=str(folder))
        main = functools.partial(
            run,
            build=functools.partial(ToyService, config),
            make_transport=make_transport,
            make_runner=make_runner,
        )
        fingerprint = config.fingerprint
        shape = config.shape
        group = Group(launcher, shape, fingerprint, main, patience, auto_commit, niceness, on_loss, balancer)
        return cls(group, folder)

    def records(self) -> dict[tuple[int, int], list[Record]]:
        """What each process saw, by rank and pid, in order."""
        found = {}
        for path in self.folder.iterdir():
            rank, pid = path.name.split(".")
            lines = path.read_text().splitlines(keepends=True)
            found[int(rank), int(pid)] = [json.loads(line) for line in lines if line.endswith("\n")]
        return found

    def steps(self) -> dict[int, int]:
        """How many steps each living rank has completed."""
        pids = self.group.pids
        records = self.records()
        return {
            rank: sum(record["kind"] == "Stepped" for record in records.get((rank, pid), []))
            for rank, pid in pids.items()
        }

    def steps_lost(self) -> int:
        """How many steps ranks left out or did twice."""
        return lost(self.records())

    def await_rest(
        self, seconds: float, wanted: Callable[[Coordinator], bool] = lambda _: True
    ) -> Coordinator:
        """The state, once it is wanted, nothing runs, and nobody is still to end. GroupError if it never
        is."""
        deadline = time.monotonic() + seconds
        while (state := self.group.state()).phase != Phase.STABLE or state.gone or not wanted(state):
            if time.monotonic() > deadline:
                raise GroupError(f"after {seconds} s the group {state.doing or 'rests'}: {state.placement}")
            time.sleep(0.01)
        return state

    def await_steps(self, count: int, seconds: float) -> None:
        """Until each rank that serves has completed so many more. GroupError if one does not."""
        before = self.steps()
        ranks = self.group.state().placement.ranks
        deadline = time.monotonic() + seconds
        while any(self.steps().get(rank, 0) < before.get(rank, 0) + count for rank in ranks):
            if time.monotonic() > deadline:
                raise GroupError(f"steps went from {before} to {self.steps()} in {seconds} s")
            time.sleep(0.02)

    def await_exits(self, count: int, seconds: float) -> tuple[tuple[int, int], ...]:
        """The exits of ranks' processes, once there are so many. A rank is known to be dead before that."""
        deadline = time.monotonic() + seconds
        while len(self.group.exits) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.group.exits


def lost(records: Mapping[tuple[int, int], list[Record]]) -> int:
    """How many steps processes left out or did twice."""
    steps = ([seen["step"] for seen in each if seen["kind"] == "Stepped"] for each in records.values())
    return sum(after != before + 1 for each in steps for before, after in itertools.pairwise(each))


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that still run."""
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
