"""A group of real processes over its life: no step is lost or done twice, nothing is captured again, nothing
leaks, nothing is left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from elastic_ep import Launcher, Patience, Shape
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_group import SlowCapture, ToyGroup, alive

SHAPE = Shape(layers=2, experts=8, slots=6, max_ranks=4)
CONFIG = ToyConfig(SHAPE, tokens=4, hidden=8, pace=0.005)
SECONDS = 30.0
CYCLES = int(os.environ.get("ELASTIC_CYCLES", "10"))
SLACK_KIB = 4096
"""What a process may grow by over all cycles: allocators keep some for themselves."""


@pytest.fixture
def toy(launcher: Launcher, tmp_path: Path) -> Iterator[ToyGroup]:
    toy = ToyGroup.start(launcher, CONFIG, tmp_path, Patience(lease=10.0))
    yield toy
    toy.group.close()


def test_no_step_is_lost_and_nothing_is_captured_again(toy: ToyGroup) -> None:
    left: list[int] = []
    for ranks in ((0, 1), (0, 1, 2), (1, 2), (1, 2, 3), (2, 3)):
        before = toy.group.pids
        toy.group.scale(ranks, SECONDS)
        left += [pid for rank, pid in before.items() if rank not in ranks]
        toy.await_steps(5, SECONDS)
    assert all(code == 0 for _, code in toy.group.exits), toy.group.exits
    assert sorted(rank for rank, _ in toy.group.exits) == [0, 1]
    assert alive(left) == []
    assert toy.steps_lost() == 0
    for (rank, _), records in toy.records().items():
        assert {record["captures"] for record in records if record["kind"] == "Flipped"} == {1}
        [tuned] = [record["tuned"] for record in records if record["kind"] == "Tuned"]
        assert tuned in (("tuned by 0", "tuned by 1") if rank > 1 else (f"tuned by {rank}",)), "not by itself"


def test_cycles_leak_nothing(toy: ToyGroup, launcher: Launcher) -> None:
    """Case 39. Rank 0 comes and goes, and leads while it is there."""
    toy.group.scale((1, 2), SECONDS)
    seen = []
    for _ in range(CYCLES):
        toy.group.scale((0, 1, 2), SECONDS)
        toy.group.scale((1, 2), SECONDS)
        toy.await_steps(2, SECONDS)
        ranks = {f"rank {rank}": pid for rank, pid in toy.group.pids.items()}
        others = {"coordinator": toy.group.director, "nursery": launcher.nursery}
        seen.append({who: usage(pid) for who, pid in (ranks | others).items()})
    first, last = seen[1], seen[-1]
    for who in ("rank 1", "rank 2", "coordinator", "nursery"):
        assert last[who]["threads"] == first[who]["threads"], who
        assert last[who]["handles"] <= first[who]["handles"], who
        assert last[who]["kib"] <= first[who]["kib"] + SLACK_KIB, who
    stayed = toy.records()[1, toy.group.pids[1]]
    flips = [record for record in stayed if record["kind"] == "Flipped"]
    assert {flip["captures"] for flip in flips} == {1}
    assert len(flips) >= 2 * CYCLES


def test_a_joiner_that_warms_up_for_longer_than_a_lease_is_not_evicted(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Case 41."""
    patience = Patience(lease=2.0, beat=0.05)
    config = attrs.evolve(CONFIG, shape=Shape(layers=8, experts=4, slots=4, max_ranks=2))
    toy = ToyGroup.start(launcher, config, tmp_path, patience, SlowCapture)
    try:
        toy.group.scale((0, 1), SECONDS)
        readied = [r for seen in toy.records().values() for r in seen if r["kind"] == "Readied"]
        assert all(record["seconds"] > patience.lease for record in readied)
        assert toy.group.exits == ()
    finally:
        toy.group.close()


def usage(pid: int) -> dict[str, int]:
    """Memory of its own, open handles and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "kib": int(fields["RssAnon"].split()[0]),
        "threads": int(fields["Threads"]),
        "handles": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


HOST = """
import sys, time
from pathlib import Path
from elastic_ep import Launcher
from elastic_ep.testing.toy_group import ENVIRONMENT, ToyGroup
from elastic_ep.testing.toy import ToyConfig
from elastic_ep import Shape
if __name__ == "__main__":
    launcher = Launcher(["elastic_ep.testing.toy_group", "nixl._api"], ENVIRONMENT)
    config = ToyConfig(Shape(layers=1, experts=4, slots=4, max_ranks=2), tokens=4, hidden=8)
    toy = ToyGroup.start(launcher, config, Path(sys.argv[1]))
    toy.group.scale((0, 1), 30)
    print(launcher.nursery, toy.group.director, *toy.group.pids.values(), flush=True)
    time.sleep(600)
"""


def test_when_the_host_is_killed_nothing_is_left(tmp_path: Path) -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    pids = [int(word) for word in host.stdout.readline().split()]
    assert len(alive(pids)) == 4
    host.kill()
    host.wait()
    host.stdout.close()
    deadline = time.monotonic() + SECONDS
    while alive(pids):
        assert time.monotonic() < deadline, f"{alive(pids)} still run"
        time.sleep(0.02)
