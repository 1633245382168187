"""What users set under ``additional_config["tt"]``, parsed once into a frozen record."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from vllm_tt_plugin.errors import ConfigurationError, Problem

DEFAULT_TRACE_REGION_SIZE = 50_000_000

_MULTI_HOST_KEYS = ("rank_binding", "mpi_args")


def _choice(*allowed: str) -> Any:
    return attrs.field(
        default=None, metadata={"expected": f"one of {', '.join(map(repr, allowed))}", "allowed": allowed}
    )


def _flag(default: bool) -> Any:
    return attrs.field(default=default, metadata={"expected": "true or false", "type": bool})


def _integer(default: int | None, minimum: int) -> Any:
    return attrs.field(
        default=default,
        metadata={"expected": f"a whole number of at least {minimum}", "type": int, "minimum": minimum},
    )


def _text() -> Any:
    return attrs.field(default=None, metadata={"expected": "a name", "type": str})


@attrs.frozen(kw_only=True)
class TTConfig:
    """The settings of one server. Each field is a key under ``additional_config["tt"]``."""

    sample_on_device_mode: Literal["all", "decode_only"] | None = _choice("all", "decode_only")
    """Which phases may sample on the device; None: every step is sampled on the host."""
    always_compat_sampling: bool = _flag(False)
    """Sample every step on the host, whatever the device can do."""
    trace_mode: Literal["all", "decode_only", "none"] | None = _choice("all", "decode_only", "none")
    """Which phases replay captured traces; None means ``all``."""
    enable_model_warmup: bool = _flag(True)
    trace_region_size: int = _integer(DEFAULT_TRACE_REGION_SIZE, 0)
    """Bytes of device memory set aside for traces."""
    worker_l1_size: int | None = _integer(None, 1)
    """Bytes of L1 for kernels on each worker core."""
    l1_small_size: int | None = _integer(None, 0)
    """Bytes of L1 for small buffers on each worker core."""
    fabric_config: str | None = _text()
    """A name of ``ttnn.FabricConfig``; None: chosen from the cluster and the model."""
    fabric_reliability_mode: Literal["STRICT_INIT", "RELAXED_INIT"] | None = _choice(
        "STRICT_INIT", "RELAXED_INIT"
    )
    dispatch_core_axis: Literal["row", "col"] | None = _choice("row", "col")
    optimizations: Literal["performance", "accuracy"] | None = _choice("performance", "accuracy")
    register_test_models: bool = _flag(False)
    phase_policy: Literal["prefill_first", "interleave", "bounded_gap"] | None = _choice(
        "prefill_first", "interleave", "bounded_gap"
    )
    """Which phase runs next; None: ``interleave`` where a prefill can be resumed, else ``prefill_first``."""
    target_itl_ms: int = _integer(500, 1)
    """Longest gap between two tokens of a request that ``bounded_gap`` allows, in milliseconds."""
    direct_decode: bool = _flag(True)
    """Schedule a steady decode directly, without vLLM's full scheduling."""
    decode_interleave_enabled: bool = _flag(True)
    decode_interleave_prefill_steps: int = _integer(2, 1)
    decode_interleave_decode_steps: int = _integer(1, 1)

    @property
    def traces_prefill(self) -> bool:
        return self.trace_mode in (None, "all")

    @property
    def traces_decode(self) -> bool:
        return self.trace_mode != "none"

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> "TTConfig":
        """Read the mapping under ``"tt"``.

        Raises ``ConfigurationError`` with every unknown key (and its nearest known one) and every value of
        the wrong kind.
        """
        fields = attrs.fields_dict(cls)
        problems = [_unknown(key, fields) for key in settings if key not in fields]
        problems += [
            Problem(
                f"additional_config.tt.{key} is {settings[key]!r}",
                f"Expected {fields[key].metadata['expected']}",
            )
            for key in settings
            if key in fields and not _fits(settings[key], fields[key].metadata)
        ]
        if problems:
            raise ConfigurationError(problems)
        return cls(**settings)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "TTConfig":
        """Read vLLM's ``additional_config``. Raises ``ConfigurationError``."""
        if not isinstance(additional_config, Mapping):
            return cls()
        settings = additional_config.get("tt", {})
        if not isinstance(settings, Mapping):
            raise ConfigurationError(
                [Problem(f"additional_config.tt is {settings!r}", "Expected a mapping of settings")]
            )
        return cls.parse(settings)


def _fits(value: Any, expected: Mapping[str, Any]) -> bool:
    if "allowed" in expected:
        return value is None or value in expected["allowed"]
    if expected["type"] is bool:
        return isinstance(value, bool)
    if expected["type"] is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= expected["minimum"]
    return value is None or (isinstance(value, str) and bool(value))


def _unknown(key: str, known: Mapping[str, Any]) -> Problem:
    if key in _MULTI_HOST_KEYS:
        return Problem(
            f"additional_config.tt.{key} asks for a launch over several hosts, which is not supported",
            f"Remove {key} and serve the mesh of one host",
        )
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Known keys: {', '.join(sorted(known))}"
    return Problem(f"additional_config.tt has no key {key!r}", hint)
