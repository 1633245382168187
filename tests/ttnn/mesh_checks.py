"""Runs in a process of its own on a mock cluster: opens meshes through the plugin, and tells what came of it.

python mesh_checks.py '[[MESH_DEVICE, SETTINGS, FABRIC_OF_THE_MODEL], ...]'
"""

import json
import sys
from typing import Any

import ttnn
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import TTPluginError
from vllm_tt_plugin.mesh import MeshSpec
from vllm_tt_plugin.mesh_ttnn import TtnnMesh

REGIONS = ("L1", "L1_SMALL", "TRACE")


class Calls:
    """The real ttnn's calls, counted on their way."""

    def __init__(self) -> None:
        self.fabrics: list[dict[str, Any]] = []
        self.closed = 0
        self._set_fabric, self._close = ttnn.set_fabric_config, ttnn.close_mesh_device
        ttnn.set_fabric_config, ttnn.close_mesh_device = self.set_fabric, self.close

    def set_fabric(self, config: Any, **others: Any) -> None:
        self.fabrics.append({"config": config.name} | {name: value.name for name, value in others.items()})
        self._set_fabric(config, **others)

    def close(self, mesh: Any) -> None:
        self.closed += 1
        self._close(mesh)


def opened(calls: Calls, name: str, settings: dict[str, Any], model: dict[str, str]) -> dict[str, Any]:
    """Open one mesh, with a submesh for each chip, and close it twice."""
    of_model = {"config": getattr(ttnn.FabricConfig, model["config"])} if model else {}
    calls.fabrics, calls.closed = [], 0
    try:
        mesh = TtnnMesh.open(MeshSpec.parse(name).shape, TTConfig.parse(settings), of_model)
    except TTPluginError as error:
        return {
            "refused": type(error).__name__,
            "says": str(error),
            "fabric after": ttnn.get_fabric_config().name,
        }
    views = {name: ttnn.get_memory_view(mesh.device, getattr(ttnn.BufferType, name)) for name in REGIONS}
    grid = mesh.device.compute_with_storage_grid_size()
    told = {
        "shape": list(mesh.shape),
        "shape in ttnn": list(mesh.device.shape),
        "fabric": ttnn.get_fabric_config().name,
        "bytes": {name: view.total_bytes_per_bank * view.num_banks for name, view in views.items()},
        "grid": [grid.x, grid.y],
    }
    submeshes = mesh.device.create_submeshes(ttnn.MeshShape(1, 1)) if mesh.shape != (1, 1) else []
    mesh.close()
    mesh.close()
    return told | {
        "submeshes": len(submeshes),
        "closed": calls.closed,
        "fabrics": calls.fabrics,
        "fabric after": ttnn.get_fabric_config().name,
    }


def main(asked: list[tuple[str, dict[str, Any], dict[str, str]]]) -> None:
    calls = Calls()
    print(json.dumps([opened(calls, *case) for case in asked]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
