"""The mesh of real devices, opened through ttnn. The only module of this package that imports ttnn."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import ConfigurationError, MeshError, Problem

_PROBE = """
try:
    import ttnn
    print("chips", ttnn.GetNumAvailableDevices())
except Exception as failure:
    print("failure", type(failure).__name__, *str(failure).partition("backtrace:")[0].split())
"""
_PROBE_TIMEOUT_S = 300
_NO_CHIPS = "No chips detected"


@attrs.frozen
class Probe:
    """What a look at ttnn and its chips found: a number of chips, or why there is none."""

    chips: int = 0
    failure: str | None = None


def probe() -> Probe:
    """Import ttnn and count the visible chips in a child process.

    A front end must neither hold the chips that its engine is about to open nor latch ``TT_VISIBLE_DEVICES``.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(failure=f"no answer within {_PROBE_TIMEOUT_S} s")
    if found := re.search(r"^chips (\d+)$", child.stdout, re.MULTILINE):
        return Probe(chips=int(found[1]))
    if found := re.search(r"^failure (.*)$", child.stdout, re.MULTILINE):
        # ttnn 0.81 raises where there is none to count.
        return Probe(chips=0) if _NO_CHIPS in found[1] else Probe(failure=found[1])
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "without a word"
    return Probe(failure=f"a process that imported it ended with {child.returncode}: {last}")


def chips_found() -> int:
    """How many chips ttnn sees in this process, within ``TT_VISIBLE_DEVICES``."""
    import ttnn

    return int(ttnn.GetNumAvailableDevices())


@attrs.frozen
class TtnnMesh:
    """An open ttnn mesh device."""

    device: Any
    shape: tuple[int, int]
    _uses_fabric: bool
    _closed: list[bool] = attrs.field(factory=list, init=False)

    @classmethod
    def open(
        cls, shape: tuple[int, int] | None, config: TTConfig, model_fabric: Mapping[str, Any]
    ) -> "TtnnMesh":
        """Set the fabric up and open a mesh of ``shape``, or of one row of all chips.

        ``model_fabric`` holds keyword arguments for ``ttnn.set_fabric_config`` that the model asks for; what
        the user set goes before them.

        Raises ``MeshError`` with what was asked for, ``ConfigurationError`` for a name ttnn does not know.
        """
        import ttnn

        chips = chips_found()
        rows, columns = shape or (1, chips)
        if rows * columns > chips:
            raise MeshError(
                f"A mesh of {rows}x{columns} needs {rows * columns} chips, and {chips} are visible."
                " Choose a smaller MESH_DEVICE, or check TT_VISIBLE_DEVICES and that no chip is missing."
            )
        fabric = _fabric_arguments(config, model_fabric, chips_in_mesh=rows * columns)
        options: dict[str, Any] = {"trace_region_size": config.trace_region_size}
        if config.worker_l1_size is not None:
            options["worker_l1_size"] = config.worker_l1_size
        if config.l1_small_size is not None:
            options["l1_small_size"] = config.l1_small_size
        if config.dispatch_core_axis is not None:
            axis = getattr(ttnn.DispatchCoreAxis, config.dispatch_core_axis.upper())
            options["dispatch_core_config"] = ttnn.DispatchCoreConfig(axis=axis)
        try:
            if fabric:
                ttnn.set_fabric_config(**fabric)
            device = ttnn.open_mesh_device(mesh_shape=ttnn.MeshShape(rows, columns), **options)
        except Exception as failure:
            if fabric:
                _disable_fabric()
            raise MeshError(
                f"ttnn could not open a {rows}x{columns} mesh with {options} and fabric {fabric}:"
                f" {_first_line(failure)}."
                " If another process holds the chips, end it; if the fabric failed, reset the cards"
                " (tt-smi -r) or choose another additional_config.tt.fabric_config."
            ) from failure
        return cls(device, (rows, columns), uses_fabric=bool(fabric))

    def wait_for(self, event: Any) -> None:
        import ttnn

        ttnn.event_synchronize(event)

    def close(self) -> None:
        import ttnn

        if self._closed:
            return
        self._closed.append(True)
        for submesh in self.device.get_submeshes():
            ttnn.close_mesh_device(submesh)
        ttnn.close_mesh_device(self.device)
        if self._uses_fabric:
            _disable_fabric()


def _first_line(failure: BaseException) -> str:
    """ttnn appends a native backtrace of dozens of lines to what it says."""
    return str(failure).strip().split("\n", 1)[0]


def _fabric_arguments(
    config: TTConfig, model_fabric: Mapping[str, Any], chips_in_mesh: int
) -> dict[str, Any]:
    """Hardware default, then the model's, then the user's. Empty: no fabric is set up."""
    import ttnn

    arguments: dict[str, Any] = {}
    if chips_in_mesh > 1:
        cluster = ttnn.cluster.get_cluster_type()
        defaults = {
            ttnn.cluster.ClusterType.GALAXY: "FABRIC_1D_RING",
            ttnn.cluster.ClusterType.TG: "FABRIC_1D_RING",
            ttnn.cluster.ClusterType.BLACKHOLE_GALAXY: "FABRIC_2D_TORUS_XY",
        }
        arguments["config"] = getattr(ttnn.FabricConfig, defaults.get(cluster, "FABRIC_1D"))
    arguments.update(model_fabric)
    if config.fabric_config is not None:
        if config.fabric_config not in ttnn.FabricConfig.__members__:
            raise ConfigurationError(
                [
                    Problem(
                        f"additional_config.tt.fabric_config is {config.fabric_config!r}",
                        f"Expected one of {', '.join(ttnn.FabricConfig.__members__)}",
                    )
                ]
            )
        arguments["config"] = ttnn.FabricConfig.__members__[config.fabric_config]
    if arguments and config.fabric_reliability_mode is not None:
        arguments["reliability_mode"] = ttnn.FabricReliabilityMode.__members__[config.fabric_reliability_mode]
    return arguments


def _disable_fabric() -> None:
    import ttnn

    with contextlib.suppress(Exception):  # the chips may be gone already; nothing is left to undo then
        ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)
