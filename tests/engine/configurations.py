"""Ways to set an engine of the oracle up: all pairs of what multiplies, policies, and the whole product."""

from collections.abc import Mapping
from itertools import product
from typing import Any

ROWS = 4
BLOCK = 4
PLAIN = {"max_num_seqs": ROWS, "block_size": BLOCK, "max_model_len": 72}

LEVELS: dict[str, tuple[Any, ...]] = {
    "mode": (None, "decode_only", "all"),
    "lanes": (1, 2),
    "ahead": (False, True),
    "v2": (False, True),
    "version": (0, 1),
}
"""``ahead``: async scheduling, which is switched off where the host samples every step."""

_PAIRS = (
    # mode, lanes, ahead, v2, version
    (None, 1, False, False, 0),
    (None, 2, True, True, 1),
    ("decode_only", 1, True, True, 0),
    ("decode_only", 2, False, False, 1),
    ("all", 1, True, False, 1),
    ("all", 2, False, True, 0),
)
_POOLS: tuple[dict[str, Any], ...] = (
    {"num_gpu_blocks_override": 19},
    {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 7},
    {"num_gpu_blocks_override": 19, "max_num_batched_tokens": 9, "scheduling_policy": "priority"},
)
"""Small enough to hurt: four requests of full length would need 73 blocks."""


def engine_of(chosen: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Settings for one level of each factor; pools go round by number."""
    settings = {
        "oracle": "Oracle" if chosen["version"] else "OracleVersion0",
        "v2_wire_form": chosen["v2"],
        "async_scheduling": chosen["ahead"],
        "additional_config": {"tt": {"sample_on_device_mode": chosen["mode"]}},
        **_POOLS[number % len(_POOLS)],
    }
    if chosen["lanes"] > 1:
        settings |= {"data_parallel_size": chosen["lanes"], "max_num_seqs": ROWS // chosen["lanes"]}
    return settings


def _named(rows: Any) -> dict[str, dict[str, Any]]:
    chosen = [dict(zip(LEVELS, row, strict=True)) for row in rows]
    return {_name(levels): engine_of(levels, number) for number, levels in enumerate(chosen)}


def _name(levels: Mapping[str, Any]) -> str:
    route = {None: "host", "decode_only": "decodes on device", "all": "device"}[levels["mode"]]
    form = f"V{1 + levels['v2']}, contract {levels['version']}"
    return f"{route}, {levels['lanes']} lanes, {'ahead' if levels['ahead'] else 'sync'}, {form}"


PAIRS = _named(_PAIRS)
PRODUCT = _named(product(*LEVELS.values()))
POLICIES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "four lanes": {
        "data_parallel_size": 4,
        "max_num_seqs": 1,
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 9,
        "additional_config": {"tt": {"sample_on_device_mode": "all"}},
    },
    "two lanes, priorities": {
        "data_parallel_size": 2,
        "max_num_seqs": 3,
        "num_gpu_blocks_override": 24,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": 6,
    },
    "one to one": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 5,
        "additional_config": {"tt": {"decode_interleave_prefill_steps": 1}},
    },
    "prefill first": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 6,
        "additional_config": {"tt": {"decode_interleave_enabled": False}},
    },
    "bounded gap": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 8,
        "additional_config": {"tt": {"phase_policy": "bounded_gap", "sample_on_device_mode": "all"}},
    },
    "bounded gap, two lanes": {
        "data_parallel_size": 2,
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 19,
        "additional_config": {"tt": {"phase_policy": "bounded_gap", "target_itl_ms": 1}},
    },
    "decodes scheduled by vLLM": {
        "num_gpu_blocks_override": 19,
        "max_num_batched_tokens": 8,
        "additional_config": {"tt": {"direct_decode": False, "sample_on_device_mode": "all"}},
    },
    "long prompts throttled": {
        "num_gpu_blocks_override": 24,
        "max_num_batched_tokens": 12,
        "long_prefill_token_threshold": 5,
    },
    "nothing declared": {"oracle": "UndeclaredOracle", "num_gpu_blocks_override": 19},
    "nothing declared, V2": {
        "v2_wire_form": True,
        "oracle": "UndeclaredOracle",
        "num_gpu_blocks_override": 19,
    },
}
