"""The toy with its experts on Tenstorrent devices, as TT traces: what a service with a device looks like."""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from elastic_ep.lane_shape import NOTE
from elastic_ep.runner import Static
from elastic_ep.runner_ttnn import TraceRunner, read, write
from elastic_ep.testing.toy import ToyConfig, ToyService


class TtnnToyService(ToyService):
    """``mesh``: opened with a trace region; it is this rank's, which closes it."""

    def __init__(self, config: ToyConfig, rank: int, mesh: Any) -> None:
        super().__init__(config, rank)
        self.device: TtnnExperts = TtnnExperts(config, self.experts["up"], mesh)

    def run_experts(self, static: Static, layer: int) -> None:
        slots = static["in_head"][:, NOTE:].flatten()
        results = self.device.run(layer, static["in"].flatten(0, 1), slots)
        static["results"].copy_(results.view_as(static["results"]))


class TtnnExperts:
    """The weights of one rank's slots, and for each layer a trace: every row through every slot, of which the
    one is taken that the row asks for. See `elastic_ep.service.Device`."""

    in_place = True

    def __init__(self, config: ToyConfig, weights: torch.Tensor, mesh: Any) -> None:
        shape, hidden = config.shape, config.hidden
        rows = (shape.max_ranks + 1) * config.lane.rows
        self._mesh = mesh
        self._host = weights
        self._lock = threading.Lock()
        names = ("rows", "nothing", "results", *(f"asks for {slot}" for slot in range(shape.slots)))
        shared = {name: self._zeros(rows, hidden) for name in names}
        self._static = [
            shared | {f"weights {slot}": self._zeros(hidden, hidden) for slot in range(shape.slots)}
            for _ in range(shape.layers)
        ]
        self._runners = [TraceRunner() for _ in range(shape.layers)]

    def capture(self) -> None:
        with self._lock:
            for runner, static in zip(self._runners, self._static, strict=True):
                runner.capture(self._experts, static)

    def check(self) -> None:
        for runner in self._runners:
            runner.check()

    def fill(self, layer: int, slot: int) -> None:
        """On the queue of the replays, so between two of them."""
        with self._lock:
            write(self._static[layer][f"weights {slot}"], self._host[layer, slot])

    def run(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``rows`` ``[rows, hidden]`` through the experts in ``slots`` ``[rows]``."""
        static = self._static[layer]
        with self._lock:
            write(static["rows"], rows)
            for slot in range(self._host.shape[1]):
                write(static[f"asks for {slot}"], (slots == slot).to(rows.dtype)[:, None].expand_as(rows))
            self._runners[layer].replay()
            return read(static["results"])

    def close(self) -> None:
        import ttnn

        for runner in self._runners:
            runner.release()
        ttnn.close_mesh_device(self._mesh)

    def _experts(self, static: Mapping[str, Any]) -> None:
        import ttnn

        chosen = static["nothing"]
        for slot in range(self._host.shape[1]):
            through = ttnn.matmul(static["rows"], static[f"weights {slot}"])
            chosen = ttnn.where(static[f"asks for {slot}"], through, chosen)
        ttnn.copy(ttnn.tanh(chosen), static["results"])

    def _zeros(self, *shape: int) -> Any:
        import ttnn

        return ttnn.from_torch(
            torch.zeros(shape), dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=self._mesh
        )
