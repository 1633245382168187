"""An expert-parallel group on this machine that grows and shrinks while it serves, without hardware.

Each rank is a process with a NIXL agent; the model is a small mixture of experts whose every result is
checked against a dense computation. Start it, then change its size from another terminal:

    .venv/bin/python examples/elastic_group.py         # until Ctrl-C
    curl -X POST 127.0.0.1:8001/scale_elastic_ep -H 'content-type: application/json' \\
        -d '{"new_data_parallel_size": 5}'

What it prints each second: the ranks that serve, the epoch, which rises with each change, and steps a second.
"""

import argparse
import contextlib
import json
import tempfile
import threading
from pathlib import Path

import uvicorn
from elastic_ep import ElasticError, Launcher, Patience, Shape
from elastic_ep.http import Control
from elastic_ep.testing.toy import ToyConfig
from elastic_ep.testing.toy_group import ENVIRONMENT, ToyGroup

SECONDS = 60.0


def latest_step(folder: Path) -> int:
    """Of whichever rank is ahead, from the end of its log."""
    steps = [0]
    for log in folder.iterdir():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().splitlines()[1:-1]
        steps += [record["step"] for record in map(json.loads, lines) if record["kind"] == "Stepped"]
    return max(steps)


def watch(toy: ToyGroup, ended: threading.Event) -> None:
    before = latest_step(toy.folder)
    while not ended.wait(1.0):
        state, now = toy.group.state(), latest_step(toy.folder)
        doing = f", {state.doing}" if state.doing else ""
        ranks = list(state.placement.ranks)
        print(f"ranks {ranks}, epoch {state.epoch}, {now - before} steps{doing}", flush=True)
        before = now


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=3, help="how many serve at first (default: 3)")
    parser.add_argument("--most", type=int, default=8, help="how many there may ever be (default: 8)")
    parser.add_argument("--port", type=int, default=8001)
    options = parser.parse_args()
    try:
        serve(options.ranks, options.most, options.port)
    except ElasticError as error:
        parser.error(str(error))


def serve(ranks: int, most: int, port: int) -> None:
    config = ToyConfig(Shape(layers=2, experts=8, slots=6, max_ranks=most), pace=0.01)
    launcher = Launcher(["elastic_ep.testing.toy_group", "nixl._api"], ENVIRONMENT)
    ended = threading.Event()
    with contextlib.closing(launcher), tempfile.TemporaryDirectory() as folder:
        toy = ToyGroup.start(launcher, config, Path(folder), Patience(lease=10.0))
        watching = threading.Thread(target=watch, args=(toy, ended))
        with contextlib.closing(toy.group):
            toy.group.scale(range(ranks), SECONDS)
            watching.start()
            try:
                uvicorn.run(
                    Control(toy.group),
                    host="127.0.0.1",
                    port=port,
                    log_level="warning",
                    timeout_graceful_shutdown=1,
                )
            finally:
                ended.set()
                watching.join()


if __name__ == "__main__":
    main()
