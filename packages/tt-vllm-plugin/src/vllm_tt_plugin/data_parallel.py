"""``--data-parallel-size N`` as N processes, for models that do not run the whole mesh as one program.

vLLM starts an engine for each rank and spreads requests over them. Each engine opens a mesh of its own, of
the shape that ``MESH_DEVICE`` names, on devices that no other rank sees: a front end deals the visible
devices out, and each engine sets its ``TT_VISIBLE_DEVICES`` before it imports a model, since TT-Metal reads
that once.
"""

import logging
from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING

import attrs

from vllm_tt_plugin.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.tt_plugin")

VISIBLE = "TT_VISIBLE_DEVICES"
_KEY = "tt_device_groups"
"""Where the groups are kept in ``additional_config``: the one place that travels to every process."""

_BY_HAND = f"start one server for each group of chips, with its own {VISIBLE}, and spread requests over them"


@attrs.frozen
class Visible:
    """What a process may use. ``devices`` are named as ``TT_VISIBLE_DEVICES`` does, and are all alike."""

    devices: tuple[str, ...]
    chips: int

    @classmethod
    def of(cls, setting: str | None, devices: int, chips: int) -> "Visible":
        """From the setting, or from what ttnn counts where it is unset or empty."""
        named = tuple(part.strip() for part in (setting or "").split(",") if part.strip())
        return cls(named or tuple(map(str, range(devices))), chips)

    @property
    def chips_of_each(self) -> int:
        return self.chips // max(1, len(self.devices))


def device_groups(visible: Visible, ranks: int, shape: tuple[int, int] | None) -> tuple[tuple[str, ...], ...]:
    """Devices for each of ``ranks`` ranks that open a mesh of ``shape``, or of an equal part of all chips.

    Devices that follow each other are taken to be neighbours; where they are not, the mesh does not open.
    Raises ``ConfigurationError`` where the chips do not suffice, or where a rank would get a part of a
    device: the two chips of an N300 stay together.
    """
    chips = shape[0] * shape[1] if shape is not None else visible.chips // ranks
    if chips == 0 or chips * ranks > visible.chips:
        raise _refusal(
            f"--data-parallel-size {ranks} needs {ranks * max(1, chips)} chips, {max(1, chips)} for each"
            f" rank, and {visible.chips} are visible",
            "Choose a smaller MESH_DEVICE, which is one rank's, or fewer ranks",
        )
    if chips % visible.chips_of_each:
        raise _refusal(
            f"a rank's mesh of {chips} chips would take a part of a device: each of"
            f" {', '.join(visible.devices)} has {visible.chips_of_each}",
            f"Choose a MESH_DEVICE with a multiple of {visible.chips_of_each} chips",
        )
    size = chips // visible.chips_of_each
    return tuple(visible.devices[rank * size : (rank + 1) * size] for rank in range(ranks))


def _refusal(found: str, fix: str) -> ConfigurationError:
    return ConfigurationError([Problem(found, fix)])


def rank_problems(config: "VllmConfig") -> Iterator[Problem]:
    """Why ranks of this configuration cannot be engines of their own."""
    parallel = config.parallel_config
    asked = f"--data-parallel-size is {parallel.data_parallel_size}"
    if config.model_config.is_moe:
        yield Problem(
            f"{asked}, and the ranks of a mixture of experts would exchange tokens at every layer",
            f"Serve an adapter that runs the whole mesh as one program (folds_dp_into_lanes), or {_BY_HAND}",
        )
    if parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb:
        yield Problem(
            f"{asked}, with ranks that are started one by one",
            f"Leave out --data-parallel-rank and the flags for load balancing, or {_BY_HAND}",
        )
    elif parallel.data_parallel_size_local != parallel.data_parallel_size:
        yield Problem(
            f"{asked}, of which {parallel.data_parallel_size_local} run on this host",
            "Serve the chips of one host",
        )


def keep_groups(config: "VllmConfig", groups: Sequence[Sequence[str]]) -> None:
    """Send the groups along to the engines."""
    if groups:
        if not isinstance(config.additional_config, dict):
            raise TypeError(
                f"additional_config is a {type(config.additional_config).__name__}, expected a dictionary"
            )
        config.additional_config[_KEY] = [list(group) for group in groups]


def run_workers_inside_engines(config: "VllmConfig") -> None:
    """vLLM gives the engine of a rank a process for its one worker, with which decodes could not overlap."""
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = "uni"


def bind_devices(config: "VllmConfig", environ: MutableMapping[str, str]) -> None:
    """In the worker of a rank, before it imports a model: let this process see the rank's devices alone."""
    extra = config.additional_config
    groups = extra.get(_KEY) if isinstance(extra, dict) else None
    if groups:
        rank = config.parallel_config.data_parallel_index
        environ[VISIBLE] = ",".join(groups[rank])
        logger.info("Rank %d has the devices %s.", rank, environ[VISIBLE])
