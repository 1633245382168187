"""A small MoE model that serves made-up tokens and checks every result against a dense computation."""

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from elastic_ep.lane_shape import NOTE, LaneShape
from elastic_ep.placement import Shape
from elastic_ep.runner import Static
from elastic_ep.service import Device, Seen

TOLERANCE = 1e-4
"""Largest difference to the dense computation: float32 sums in another order."""


@attrs.frozen
class ToyConfig:
    """``pace`` is the least time of a step, in seconds; ``favour`` how many times louder than others the gate
    asks for the last expert; ``drains`` how many steps the requests last of a rank that is to leave;
    ``hangs`` a method, ``begin`` or ``apply``, and the rank and step in which that hangs; ``log`` the folder
    that ranks write what they saw to."""

    shape: Shape
    tokens: int = 8
    hidden: int = 16
    top: int = 2
    pace: float = 0.0
    favour: float = 1.0
    drains: int = 0
    hangs: tuple[str, int, int] = ("", -1, -1)
    log: str = ""

    @property
    def lane(self) -> LaneShape:
        shape = self.shape
        return LaneShape(shape.max_ranks, shape.slots, self.tokens, self.top, self.hidden)

    @property
    def fingerprint(self) -> str:
        return repr((self.shape, self.lane))


class ToyService:
    """One rank of it; see `elastic_ep.service.Service`. A wrong result raises, and so ends the rank."""

    dtype = torch.float32
    device: Device | None = None

    def __init__(self, config: ToyConfig, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.shape, self.lane = config.shape, config.lane
        self.fingerprint = config.fingerprint
        layers, experts, hidden = self.shape.layers, self.shape.experts, config.hidden
        self.dense = {
            "gate": torch.zeros((layers, hidden, experts)),
            "mix": torch.zeros((layers, hidden, hidden)),
        }
        self.experts = {"up": torch.zeros((layers, self.shape.slots, hidden, hidden))}
        self.state = {
            "inputs": torch.zeros((config.tokens, hidden)),
            "hidden": torch.zeros((config.tokens, hidden)),
            "rows": torch.arange((self.lane.max_ranks + 1) * self.lane.rows),
        }
        self._weights = {
            "gate": _seeded(1, (layers, hidden, experts)),
            "mix": _seeded(2, (layers, hidden, hidden)) / hidden**0.5,
            "up": _seeded(3, (layers, experts, hidden, hidden)) / hidden**0.5,
        }
        self._weights["gate"][:, :, -1] *= config.favour
        self._began = 0.0
        self._left = 0
        self._leaves = False
        path = Path(config.log, f"{rank}.{os.getpid()}")
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if config.log else None

    def load_dense(self) -> None:
        for name, tensor in self.dense.items():
            tensor.copy_(self._weights[name])

    def load_expert(self, layer: int, expert: int, slot: int) -> None:
        self.experts["up"][layer, slot].copy_(self._weights["up"][layer, expert])

    def tune(self, found: bytes | None) -> bytes:
        """Nothing to find out: just who was the first."""
        tuned = f"tuned by {self.rank}" if found is None else found.decode()
        self._write("Tuned", {"tuned": tuned})
        return tuned.encode()

    def begin(self, step: int) -> None:
        self._hang_if("begin", step)
        self._began = time.monotonic()
        self.state["inputs"].copy_(self._inputs(step))
        self.state["hidden"].copy_(self.state["inputs"])

    def before(self, static: Static, layer: int) -> None:
        hidden = static["state.hidden"]
        mixed = hidden + torch.tanh(hidden @ static["dense.mix"][layer])
        chosen = torch.topk(static["state.inputs"] @ static["dense.gate"][layer], self.config.top, dim=1)
        static["state.hidden"].copy_(mixed)
        static["tokens"].copy_(mixed)
        static["experts"].copy_(chosen.indices)
        static["weights"].copy_(torch.softmax(chosen.values, dim=1))
        static["count"].fill_(self.config.tokens)

    def run_experts(self, static: Static, layer: int) -> None:
        """Every row through every slot, then the one that it asks for: no shape depends on the contents."""
        rows = static["in"].flatten(0, 1)
        slots = static["in_head"][:, NOTE:].flatten().clamp(min=0)
        chosen = (rows @ static["experts.up"][layer])[slots, static["state.rows"]]
        static["results"].copy_(torch.tanh(chosen).view_as(static["results"]))

    def after(self, static: Static, layer: int) -> None:
        static["state.hidden"].add_(static["output"])

    def apply(self, step: int) -> None:
        self._hang_if("apply", step)
        self._left -= self._leaves
        error = float((self.state["hidden"] - self._reference(step)).abs().max())
        if not error < TOLERANCE:
            raise AssertionError(f"rank {self.rank}, step {step}: off by {error} from the dense computation")
        time.sleep(max(0.0, self._began + self.config.pace - time.monotonic()))

    def leaving(self, leaves: bool) -> None:
        self._leaves, self._left = leaves, self.config.drains
        self._write("Leaving", {"leaves": leaves})

    @property
    def idle(self) -> bool:
        return self._left <= 0

    def seen(self, record: Seen) -> None:
        fields = {a.name: getattr(record, a.name) for a in attrs.fields(type(record))}
        placement = fields.pop("placement", None)
        ranks = {} if placement is None else {"ranks": placement.ranks}
        self._write(type(record).__name__, {**fields, **ranks})

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._log is not None:
            line = {"kind": kind, "rank": self.rank, **fields}
            os.write(self._log, f"{json.dumps(line)}\n".encode())

    def _hang_if(self, method: str, step: int) -> None:
        if (method, self.rank, step) == self.config.hangs:
            threading.Event().wait()

    def _inputs(self, step: int) -> torch.Tensor:
        return _seeded(1000 + 31 * step + self.rank, (self.config.tokens, self.config.hidden))

    def _reference(self, step: int) -> torch.Tensor:
        hidden = inputs = self._inputs(step)
        for layer in range(self.shape.layers):
            hidden = hidden + torch.tanh(hidden @ self._weights["mix"][layer])
            chosen = torch.topk(inputs @ self._weights["gate"][layer], self.config.top, dim=1)
            every = torch.tanh(hidden @ self._weights["up"][layer])
            parts = every[chosen.indices, torch.arange(len(hidden))[:, None]]
            hidden = hidden + (torch.softmax(chosen.values, dim=1)[:, :, None] * parts).sum(dim=1)
        return hidden


def _seeded(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
