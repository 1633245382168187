"""Lanes: ``--data-parallel-size N`` as N in-process lanes of one mesh.

A model that runs the whole mesh as one program cannot be started N times. Its data parallelism is a split
of the batch: lane i owns rows ``[i * n, (i + 1) * n)``, its own queues and its own KV cache. vLLM is told
that there is one engine of one process.
"""

import copy
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tt_registry import LaneRule

from vllm_tt_plugin.errors import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.tt_plugin")

_KEY = "tt_lanes"
"""Where the number of lanes is kept in ``additional_config``: the one place that travels to every process."""


def lanes_of(config: "VllmConfig") -> int:
    """How many lanes a configuration has after ``fold_data_parallel``."""
    extra = config.additional_config
    return int(extra.get(_KEY, 1)) if isinstance(extra, dict) else 1


def rows_per_lane(config: "VllmConfig") -> int:
    """``--max-num-seqs`` as the user gave it."""
    return int(config.scheduler_config.max_num_seqs) // lanes_of(config)


def lane_problems(lanes: int, rule: LaneRule, mesh_shape: tuple[int, int]) -> Iterator[Problem]:
    """Why ``lanes`` lanes do not fit a mesh."""
    rows, columns = mesh_shape
    if rows * columns % lanes:
        yield Problem(
            f"--data-parallel-size {lanes} does not divide the {rows * columns} devices of the mesh",
            "Choose a divisor of the number of devices",
        )
    elif not rule.allows(lanes, mesh_shape):
        yield Problem(
            f"--data-parallel-size {lanes} does not fit this model on a {rows}x{columns} mesh",
            f"It takes {rule.value}",
        )


def fold_data_parallel(config: "VllmConfig") -> None:
    """Turn ``data_parallel_size`` into lanes, once: every value that vLLM derived from it goes back to one
    process, and ``max_num_seqs`` becomes the rows of all lanes together."""
    parallel = config.parallel_config
    lanes = parallel.data_parallel_size
    if lanes == 1:
        return
    if not isinstance(config.additional_config, dict):
        raise TypeError(
            f"additional_config is a {type(config.additional_config).__name__}, expected a dictionary"
        )
    config.additional_config[_KEY] = lanes
    config.scheduler_config.max_num_seqs *= lanes
    parallel.data_parallel_size = parallel.data_parallel_size_local = 1
    parallel.data_parallel_rank = parallel.data_parallel_index = 0
    parallel.data_parallel_rank_local = None
    parallel.data_parallel_external_lb = parallel.data_parallel_hybrid_lb = False
    parallel.elastic_ep_max_dp_size = 1
    if parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = "uni"
    logger.info(
        "Data parallelism becomes %d lanes of %d sequences in one process.", lanes, rows_per_lane(config)
    )


def config_of_one_lane(config: "VllmConfig") -> "VllmConfig":
    """A copy whose ``max_num_seqs`` is one lane's, for that lane's scheduler."""
    lane: Any = copy.copy(config)
    lane.scheduler_config = copy.copy(config.scheduler_config)
    lane.scheduler_config.max_num_seqs = rows_per_lane(config)
    return lane  # type: ignore[no-any-return]
