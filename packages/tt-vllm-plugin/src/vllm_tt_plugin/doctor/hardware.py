"""The chips, the mesh that would open on them, and memory."""

from collections.abc import Iterator

from vllm_tt_plugin.checks import chip_problems
from vllm_tt_plugin.doctor.facts import Facts
from vllm_tt_plugin.doctor.finding import Finding
from vllm_tt_plugin.errors import ConfigurationError, Problem
from vllm_tt_plugin.mesh import MeshSpec, default_fabric, fabric_problems
from vllm_tt_plugin.mesh_ttnn import Probe

LITTLE_MEMORY = 8 * 2**30
"""Bytes. vLLM's processes take a few GB before a model's weights pass through."""
MOCK_CLUSTER = "TT_METAL_MOCK_CLUSTER_DESC_PATH"


def hardware_findings(facts: Facts) -> Iterator[Finding]:
    """What ``MESH_DEVICE`` would open here."""
    for problem in facts.setting_problems:
        yield Finding.of("mesh", problem)
    try:
        spec = MeshSpec.parse(facts.environ.get("MESH_DEVICE"))
    except ConfigurationError as error:
        yield from (Finding.of("mesh", problem) for problem in error.problems)
    else:
        if spec.on_host:
            rows, columns = spec.shape or (1, 1)
            yield Finding(
                "mesh", "ok", f"a host mesh of {rows}x{columns}: models run on the CPU, without devices"
            )
        else:
            yield from _device_findings(facts, spec)
    yield _memory_finding(facts.memory_available)


def _device_findings(facts: Facts, spec: MeshSpec) -> Iterator[Finding]:
    if facts.probe is None:
        yield Finding(
            "devices",
            "problem",
            "ttnn is not installed and MESH_DEVICE names no host mesh, so the plugin stays out of the way",
            "Run in the environment of TT-Metal, or set MESH_DEVICE=host to serve without devices",
        )
        return
    problems = chip_problems(spec, facts.probe)
    if facts.probe.chips:
        yield Finding("devices", "ok", f"{facts.probe.chips} chips, a cluster of type {facts.probe.cluster}")
    elif facts.probe.failure is None:
        problems = [_no_chips(len(facts.driver_files))]
    yield from (Finding.of("devices", problem) for problem in problems)
    if MOCK_CLUSTER in facts.environ:
        yield Finding(
            "devices", "warning", f"{MOCK_CLUSTER} is set: the chips are only described", "Unset it to serve"
        )
    for holder in facts.holders:
        yield Finding(
            "devices",
            "warning",
            f"process {holder.pid} ({holder.command}) has a card open, and a chip serves one process",
            "End it, unless it uses other chips or only watches",
        )
    if not problems:
        yield from _mesh_findings(facts, spec, facts.probe)


def _no_chips(cards: int) -> Problem:
    """Whether the driver sees cards tells a missing driver from a card that hangs."""
    if cards == 0:
        return Problem(
            "no Tenstorrent chip was found, and there is no /dev/tenstorrent",
            "Load the driver (modprobe tenstorrent) or give the container its devices;"
            " MESH_DEVICE=host serves without devices",
        )
    return Problem(
        f"no Tenstorrent chip was found, though the driver has {cards} cards in /dev/tenstorrent",
        "Check TT_VISIBLE_DEVICES, and reset the cards (tt-smi -r); MESH_DEVICE=host serves without devices",
    )


def _mesh_findings(facts: Facts, spec: MeshSpec, probe: Probe) -> Iterator[Finding]:
    rows, columns = spec.shape or (1, probe.chips)
    name = facts.settings.fabric_config
    problems = fabric_problems(name, probe.fabric_names)
    yield from (Finding.of("mesh", problem) for problem in problems)
    if problems:
        return
    default = default_fabric(probe.cluster, rows * columns)
    fabric = f"fabric {name}, as set" if name else f"fabric {default}, unless the model asks for another"
    if not name and default is None:
        fabric = "no fabric, unless the model asks for one"
    unused = probe.chips - rows * columns
    yield Finding(
        "mesh",
        "ok",
        f"a {rows}x{columns} mesh{f' ({unused} chips stay unused)' if unused else ''}; {fabric};"
        f" {facts.settings.trace_region_size} bytes for traces",
    )


def _memory_finding(available: int) -> Finding:
    text = f"{available / 2**30:.1f} GiB of memory are free on the host"
    if available >= LITTLE_MEMORY:
        return Finding("memory", "ok", text)
    return Finding(
        "memory", "warning", text, "End other programs: weights pass through host memory when they load"
    )
