"""The mesh of devices a server runs on: what ``MESH_DEVICE`` asks for, and the host mesh.

``MESH_DEVICE`` names a product (``N150``, ``T3K``, ...), a shape (``"(4,8)"``), or the host mesh (``host``,
``host:8x4``): a mesh of that shape on the CPU, which needs no hardware and no ttnn. Everything above the mesh
is the same for both.
"""

import re
from collections.abc import Collection
from typing import Any, Protocol

import attrs

from vllm_tt_plugin.errors import ConfigurationError, Problem

MESH_SHAPES: dict[str, tuple[int, int]] = {
    "N150": (1, 1),
    "P100": (1, 1),
    "P150": (1, 1),
    "N300": (1, 2),
    "P300": (1, 2),
    "P150x2": (1, 2),
    "N150x4": (1, 4),
    "P150x4": (1, 4),
    "P300x2": (1, 4),
    "T3K": (1, 8),
    "P150x8": (1, 8),
    "TG": (8, 4),
    "BH-Galaxy": (8, 4),
}
"""Rows and columns of each product, as TT-Metal's own tools name them."""

GALAXY_FABRICS = {
    "GALAXY": "FABRIC_1D_RING",
    "TG": "FABRIC_1D_RING",
    "BLACKHOLE_GALAXY": "FABRIC_2D_TORUS_XY",
}
"""Clusters, by their names in ``ttnn.cluster.ClusterType``, that are wired for more than a line."""

_HOST = re.compile(r"host(?::(\d+)x(\d+))?")
_SHAPE = re.compile(r"\(\s*(\d+)\s*,\s*(\d+)\s*\)")


@attrs.frozen
class MeshSpec:
    """Which mesh to open. ``shape`` is (rows, columns); None: one row of all chips that are found."""

    on_host: bool
    shape: tuple[int, int] | None

    @classmethod
    def parse(cls, value: str | None) -> "MeshSpec":
        """Read ``MESH_DEVICE``. Raises ``ConfigurationError`` naming every accepted form."""
        text = (value or "").strip()
        if not text:
            return cls(on_host=False, shape=None)
        if match := _HOST.fullmatch(text):
            rows, columns = match.groups(default="1")
            return cls._of(text, True, int(rows), int(columns))
        if match := _SHAPE.fullmatch(text):
            return cls._of(text, False, int(match[1]), int(match[2]))
        if text in MESH_SHAPES:
            return cls(on_host=False, shape=MESH_SHAPES[text])
        raise _unknown(text)

    @classmethod
    def _of(cls, text: str, on_host: bool, rows: int, columns: int) -> "MeshSpec":
        if rows * columns == 0:
            raise _unknown(text)
        return cls(on_host=on_host, shape=(rows, columns))


def _unknown(text: str) -> ConfigurationError:
    return ConfigurationError(
        [
            Problem(
                f"MESH_DEVICE is {text!r}",
                f"Expected one of {', '.join(MESH_SHAPES)}, a shape such as '(4,8)', 'host', or 'host:8x4'",
            )
        ]
    )


def default_fabric(cluster: str, chips_in_mesh: int) -> str | None:
    """The ``ttnn.FabricConfig`` that a mesh gets unless the model or the user names one; None on one chip."""
    return GALAXY_FABRICS.get(cluster, "FABRIC_1D") if chips_in_mesh > 1 else None


def fabric_problems(name: str | None, known: Collection[str]) -> list[Problem]:
    """Whether ``additional_config.tt.fabric_config`` is one of the names that ttnn knows."""
    if name is None or name in known:
        return []
    return [Problem(f"additional_config.tt.fabric_config is {name!r}", f"Expected one of {', '.join(known)}")]


class Mesh(Protocol):
    """An open mesh. The runner waits on a device's events through it and closes it, nothing else."""

    @property
    def device(self) -> Any:
        """What adapters receive as ``mesh_device``."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    def wait_for(self, event: Any) -> None:
        """Block until ``event``, which an adapter returned from ``read_decode_output``, has happened."""

    def close(self) -> None:
        """Give the devices back. Safe to call twice."""


@attrs.frozen
class HostDevice:
    """The ``mesh_device`` of a host mesh: it has a shape and a number of devices, as ttnn's has."""

    shape: tuple[int, int]

    def get_num_devices(self) -> int:
        return self.shape[0] * self.shape[1]


@attrs.frozen
class HostMesh:
    """A mesh of CPU "devices" for adapters written in plain torch."""

    device: HostDevice

    @classmethod
    def open(cls, shape: tuple[int, int]) -> "HostMesh":
        return cls(HostDevice(shape))

    @property
    def shape(self) -> tuple[int, int]:
        return self.device.shape

    def wait_for(self, event: Any) -> None:
        event.synchronize()

    def close(self) -> None:
        """Nothing to give back."""
