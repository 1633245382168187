"""What an adapter class says about itself, as a typed record."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from tt_registry.errors import CapabilityError

CONTRACT_VERSIONS = (0, 1)


@attrs.frozen
class Rule:
    """How a declared value is checked; `freeze` turns what adapters write into what the record keeps."""

    expected: str
    accepts: Callable[[Any], bool]
    freeze: Callable[[Any], Any] = lambda value: value


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


_FLAG = Rule("a bool", lambda value: type(value) is bool)
_COUNT = Rule("an int of at least 1", _is_count)
_COUNT_OR_NONE = Rule("an int of at least 1, or None", lambda value: value is None or _is_count(value))
_NAMES = Rule("a tuple or list", lambda value: isinstance(value, tuple | list), tuple)
_KEYWORDS = Rule(
    "a dict with str keys, or None",
    lambda value: (
        value is None or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value))
    ),
    lambda value: None if value is None else dict(value),
)
_LOGPROBS = Rule("'none', 'sampled' or 'top32'", lambda value: value in ("none", "sampled", "top32"))
_CONTRACT = Rule("0 or 1", lambda value: type(value) is int and value in CONTRACT_VERSIONS)


def _capability(rule: Rule, default: object, *, attribute: str | None = None) -> Any:
    return attrs.field(default=default, metadata={"rule": rule, "attribute": attribute})


@attrs.frozen
class Capabilities:
    """What scheduler, sampler and runner may ask of an adapter.

    All but the last two are keys of the class's `model_capabilities`; `decode_input_update_contract` and
    `hybrid_kv_cache_groups` (`_HYBRID_KV_CACHE_GROUPS_ENABLED`) are class attributes of their own.
    A random row with `top_k < 1` or above `max_device_top_k` is sampled on the host.
    A random row with a seed is sampled on the host unless `supports_device_seeds`: the device draws its token
    from the seed and the token's position alone, as the host does, and gets the same one.
    `device_logprobs` says what comes with tokens sampled on the device: nothing, the logprob of each token,
    or the 32 highest of its row with their ids, sorted.
    `fabric_config` holds keyword arguments for `ttnn.set_fabric_config`; it is a copy, not to be changed.
    """

    supports_prefix_caching: bool = _capability(_FLAG, False)
    supports_chunked_prefill: bool = _capability(_FLAG, False)
    supports_async_decode: bool = _capability(_FLAG, False)
    supports_sample_on_device: bool = _capability(_FLAG, False)
    supports_device_penalties: bool = _capability(_FLAG, True)
    supports_device_seeds: bool = _capability(_FLAG, False)
    max_device_top_k: int | None = _capability(_COUNT_OR_NONE, None)
    supports_device_grammar: bool = _capability(_FLAG, False)
    device_logprobs: str = _capability(_LOGPROBS, "none")
    fabric_config: Mapping[str, object] | None = attrs.field(
        default=None, hash=False, metadata={"rule": _KEYWORDS, "attribute": None}
    )
    output_tokens_per_step: int = _capability(_COUNT, 1)
    tt_adaptive_block_output: bool = _capability(_FLAG, False)
    supports_spec_decode: bool = _capability(_FLAG, False)
    spec_requirements: tuple[object, ...] = _capability(_NAMES, ())
    spec_hidden_handoff: tuple[object, ...] = _capability(_NAMES, ())
    supports_async_spec_decode: bool = _capability(_FLAG, False)
    folds_dp_into_lanes: bool = _capability(_FLAG, False)
    rows_must_be_packed: bool = _capability(_FLAG, False)
    decode_input_update_contract: int = _capability(_CONTRACT, 0, attribute="decode_input_update_contract")
    hybrid_kv_cache_groups: bool = _capability(_FLAG, False, attribute="_HYBRID_KV_CACHE_GROUPS_ENABLED")

    @classmethod
    def from_class(cls, adapter: type, defaults: "Capabilities | None" = None) -> "Capabilities":
        """Read what `adapter` declares; what it leaves out comes from `defaults`. Unknown keys are ignored.

        Raises `CapabilityError` on a value of the wrong type or range, and on a contract version but 0 and 1.
        """
        declared = getattr(adapter, "model_capabilities", None)
        if declared is None:
            declared = {}
        if not isinstance(declared, Mapping):
            raise CapabilityError(adapter.__qualname__, "model_capabilities", declared, "a dict")
        values: dict[str, Any] = {}
        for field in attrs.fields(cls):
            attribute, rule = field.metadata["attribute"], field.metadata["rule"]
            key = attribute or field.name
            if attribute is None and key in declared:
                value = declared[key]
            elif attribute is not None and hasattr(adapter, attribute):
                value = getattr(adapter, attribute)
            else:
                continue
            if not rule.accepts(value):
                raise CapabilityError(adapter.__qualname__, key, value, rule.expected)
            values[field.name] = rule.freeze(value)
        return attrs.evolve(defaults or cls(), **values)

    def refusals(self) -> tuple[str, ...]:
        """What this model declares that cannot be served yet, one sentence each; empty if it can be."""
        reasons = []
        if self.output_tokens_per_step != 1 or self.tt_adaptive_block_output:
            reasons.append(
                f"block output (output_tokens_per_step={self.output_tokens_per_step}, "
                f"tt_adaptive_block_output={self.tt_adaptive_block_output}) is not supported yet; "
                "expected one token per step"
            )
        if self.supports_spec_decode or self.supports_async_spec_decode:
            reasons.append("speculative decoding is not supported yet; expected supports_spec_decode = False")
        return tuple(reasons)
