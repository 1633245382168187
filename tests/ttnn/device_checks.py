"""Run in a process of their own on a mock cluster: all checks that one mesh after another is opened for."""

import ttnn

from . import kit_checks, sampler_checks
from .checks import outcomes


def on_meshes(asked: list[tuple[int, int, str]]) -> list[dict[str, str]]:
    """Of each mesh, given as [rows, columns, fabric]."""
    told = []
    for rows, columns, fabric in asked:
        ttnn.set_fabric_config(getattr(ttnn.FabricConfig, fabric))
        mesh = ttnn.open_mesh_device(ttnn.MeshShape(rows, columns), trace_region_size=1_000_000)
        told.append({**outcomes(sampler_checks.Checks, mesh), **outcomes(kit_checks.Checks, mesh)})
        ttnn.close_mesh_device(mesh)
    return told
