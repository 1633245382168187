"""Open meshes through the plugin, in a process of their own on a mock cluster, and tell what came of it."""

import ast
from typing import Any

import ttnn
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import TTPluginError
from vllm_tt_plugin.mesh import MeshSpec
from vllm_tt_plugin.mesh_ttnn import TtnnMesh

from .calls import FILES, texts
from .counted import Counted

REGIONS = ("L1", "L1_SMALL", "TRACE")


def opened(calls: Counted, name: str, settings: dict[str, Any], model: dict[str, str]) -> dict[str, Any]:
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


def opened_all(asked: list[tuple[str, dict[str, Any], dict[str, str]]]) -> list[dict[str, Any]]:
    """Of each [MESH_DEVICE, settings, fabric of the model]."""
    calls = Counted()
    told = [opened(calls, *case) for case in asked]
    run_texts()
    return told


def run_texts() -> None:
    """Run what our sources hold as text, to ask ttnn in a child process, so that its calls are seen too."""
    for path in FILES:
        for text in texts(ast.parse(path.read_text())):
            exec(compile(text, path, "exec"), {})
