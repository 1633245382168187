"""The mesh of real devices, opened through ttnn. The only module of this package that imports ttnn."""

import contextlib
import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import ConfigurationError, MeshError
from vllm_tt_plugin.mesh import default_fabric, fabric_problems

logger = logging.getLogger("vllm.tt_plugin")

_PROBE = """
import json
told = {}
try:
    import ttnn
    told["fabric_names"] = list(ttnn.FabricConfig.__members__)
    told["chips"] = ttnn.GetNumAvailableDevices()
    told["devices"] = ttnn.GetNumPCIeDevices()
    told["cluster"] = ttnn.cluster.get_cluster_type().name
except Exception as failure:
    told["failure"] = " ".join([type(failure).__name__, *str(failure).partition("backtrace:")[0].split()])
print("probe", json.dumps(told))
"""
_PROBE_TIMEOUT_S = 300
_NO_CHIPS = "No chips detected"
_TAKEN = re.compile(
    r"Waiting for (?:KMD )?lock .+? held by (?:thread TID: \d+, PID: \d+|another handle)"
    r"|another process is already holding [\w ]+\w"
)
"""What libtt-umd 0.9.14, a part of ttnn 0.81.1, logs while it waits for the lock of a chip, without end; and
what it raises where another process has mapped the host memory that it needs."""


@attrs.frozen
class Probe:
    """What a look at ttnn and its chips found: a number of chips, or why there is none."""

    chips: int = 0
    failure: str | None = None
    cluster: str = ""
    """A name of ``ttnn.cluster.ClusterType``; empty where no chip was found."""
    devices: int = 0
    """How many of the chips the host reaches by itself, which are those that ``TT_VISIBLE_DEVICES`` names."""
    fabric_names: tuple[str, ...] = ()
    """The names of ``ttnn.FabricConfig``; empty where ttnn could not be imported."""


def probe() -> Probe:
    """Import ttnn and count the visible chips in a child process.

    A front end must neither hold the chips that its engine is about to open nor latch ``TT_VISIBLE_DEVICES``.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        holder = taken((late.stdout or b"").decode(errors="replace"))
        return Probe(failure=f"no answer within {_PROBE_TIMEOUT_S} s{f': {holder}' if holder else ''}")
    if found := re.search(r"^probe (.*)$", child.stdout, re.MULTILINE):
        return _as_told(json.loads(found[1]))
    lines = [line.strip() for line in child.stdout.splitlines() if line.strip()]
    last = lines[-1] if lines else "without a word"
    return Probe(failure=f"a process that imported it ended with {child.returncode}: {last}")


def _as_told(told: dict[str, Any]) -> Probe:
    names = tuple(told.pop("fabric_names", ()))
    if _NO_CHIPS in told.get("failure", ""):  # ttnn 0.81 raises where there is none to count
        return Probe(fabric_names=names)
    return Probe(**told, fabric_names=names)


def taken(said: str) -> str | None:
    """That another process holds the chips, if ttnn ``said`` so in a log or an error, and what to do."""
    found = _TAKEN.search(said)
    return f"another process holds the chips; end it, then start again ({found[0]})" if found else None


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
        try:
            options = _options(config, fabric)
            if fabric:
                ttnn.set_fabric_config(**fabric)
            device = ttnn.open_mesh_device(mesh_shape=ttnn.MeshShape(rows, columns), **options)
        except Exception as failure:
            if fabric:
                _disable_fabric()
            raise MeshError(_could_not_open(rows, columns, config, fabric, failure)) from failure
        name = fabric["config"].name if "config" in fabric else "none"
        logger.info(
            "Opened a %dx%d mesh of devices %s, fabric: %s.", rows, columns, device.get_device_ids(), name
        )
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


def _options(config: TTConfig, fabric: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``ttnn.open_mesh_device``: what is not set stays ttnn's."""
    import ttnn

    options: dict[str, Any] = {"trace_region_size": config.trace_region_size}
    if config.worker_l1_size is not None:
        options["worker_l1_size"] = config.worker_l1_size
    if config.l1_small_size is not None:
        options["l1_small_size"] = config.l1_small_size
    if config.dispatch_core_axis is not None:
        options["dispatch_core_config"] = ttnn.DispatchCoreConfig(
            axis=getattr(ttnn.DispatchCoreAxis, config.dispatch_core_axis.upper()),
            fabric_tensix_config=fabric.get("fabric_tensix_config"),
        )
    return options


def _could_not_open(
    rows: int, columns: int, config: TTConfig, fabric: Mapping[str, Any], failure: BaseException
) -> str:
    settings = {
        name: getattr(config, name)
        for name in ("trace_region_size", "worker_l1_size", "l1_small_size", "dispatch_core_axis")
    }
    asked = [f"{name} {value}" for name, value in settings.items() if value is not None]
    asked += [f"fabric {name} {value}" for name, value in fabric.items()]
    could_not = f"ttnn could not open a {rows}x{columns} mesh ({', '.join(asked)})"
    if holder := taken(str(failure)):
        return f"{could_not}: {holder}."
    return (
        f"{could_not}: {_in_words(failure)}."
        " If another process holds the chips, end it. If the fabric does not fit the cables, choose another"
        " additional_config.tt.fabric_config (FABRIC_1D fits them all) or another MESH_DEVICE; if it failed,"
        " reset the cards (tt-smi -r). `tt-vllm doctor` says more."
    )


def _in_words(failure: BaseException) -> str:
    """What ttnn says, without the place in its source before it and the native backtrace behind it."""
    said, _, _ = str(failure).partition("backtrace:")
    place, _, words = said.partition("info:")
    return " ".join((words or place).split()).rstrip(".")


def _fabric_arguments(
    config: TTConfig, model_fabric: Mapping[str, Any], chips_in_mesh: int
) -> dict[str, Any]:
    """Hardware default, then the model's, then the user's. Empty: no fabric is set up."""
    import ttnn

    names = ttnn.FabricConfig.__members__
    problems = fabric_problems(config.fabric_config, names)
    if problems:
        raise ConfigurationError(problems)
    arguments: dict[str, Any] = {}
    default = default_fabric(ttnn.cluster.get_cluster_type().name, chips_in_mesh)
    if default is not None:
        arguments["config"] = names[default]
    arguments.update(model_fabric)
    if config.fabric_config is not None:
        arguments["config"] = names[config.fabric_config]
    if arguments and config.fabric_reliability_mode is not None:
        arguments["reliability_mode"] = ttnn.FabricReliabilityMode.__members__[config.fabric_reliability_mode]
    return arguments


def _disable_fabric() -> None:
    import ttnn

    with contextlib.suppress(RuntimeError):  # the chips may be gone already; nothing is left to undo then
        ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)
