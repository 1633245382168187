"""Where a step is sampled: on the device if every row can be expressed there, else on the host, and why.

A request's blockers (`row_reasons`) are worked out once, when it is admitted; a step's route is a scan
over them (`route_rows`). `route` does both, for those who are not in a hurry.
"""

import enum
from collections.abc import Hashable, Iterable, Sequence

import attrs

from tt_sampling.wire import NO_LOGPROBS, TOP_LOGPROBS, RowParams


class Phase(enum.Enum):
    """What a step runs; never both."""

    PREFILL = "prefill"
    DECODE = "decode"


class SampleMode(enum.Enum):
    """What the user allows: `sample_on_device_mode` unset, `decode_only` or `all`."""

    HOST = "host"
    DECODE_ONLY = "decode_only"
    ALL = "all"


class DeviceLogprobs(enum.Enum):
    """Which logprobs a device returns: none, the sampled token's, or the 32 highest with their ids."""

    NONE = "none"
    SAMPLED = "sampled"
    TOP32 = "top32"


class Reason(enum.Enum):
    """Why a step is sampled on the host. The value is the text; `label` names it in metrics."""

    HOST_MODE = "sample_on_device_mode is not set"
    ALWAYS_COMPAT = "always_compat_sampling is set"
    PREFILL = "sample_on_device_mode is decode_only and this step is a prefill"
    NO_DEVICE_SAMPLER = "the model does not sample on the device"
    TOP_K = "it samples at random with more candidates than the device keeps, or with all"
    PENALTIES = "it has penalties and the device applies none"
    PREFILL_PENALTIES = "it has penalties and a prefill call carries no token histories"
    SEED = "it has a seed and the device takes none"
    MIN_P = "it has min_p and the device takes none"
    LOGPROBS = "it wants more logprobs than the device returns"
    SAMPLED_LOGPROB = "it wants logprobs and what the device returns may not tell its token's rank"
    GRAMMAR = "it follows a grammar and the device takes no mask in this phase"
    LOGIT_BIAS = "it has a logit bias"
    ALLOWED_TOKENS = "it allows only some tokens"
    BAD_WORDS = "it excludes words"
    MIN_TOKENS = "it may not end yet (min_tokens)"
    STATEFUL_PROCESSORS = "it runs logits processors of its own"

    @property
    def label(self) -> str:
        return self.name.lower()


@attrs.frozen
class DeviceCapabilities:
    """What a model and its device can express. `max_top_k` None: random rows may have any k, or none."""

    can_sample: bool = False
    max_top_k: int | None = None
    penalties: bool = True
    seeds: bool = False
    min_p: bool = False
    logprobs: DeviceLogprobs = attrs.field(default=DeviceLogprobs.NONE, converter=DeviceLogprobs)
    grammar: bool = False
    logit_bias: bool = False
    allowed_tokens: bool = False
    bad_words: bool = False
    min_tokens: bool = False
    stateful_processors: bool = False


@attrs.frozen
class RowNeeds:
    """What one request needs: its parameters, and whether anything else edits its logits."""

    params: RowParams
    grammar: bool = False
    logit_bias: bool = False
    allowed_tokens: bool = False
    bad_words: bool = False
    min_tokens: bool = False
    stateful_processors: bool = False


@attrs.frozen
class Route:
    """Where a step is sampled. `reasons` holds (request id, reason), or (None, reason) for the whole step;
    without any, it is the device."""

    reasons: tuple[tuple[Hashable | None, Reason], ...] = ()

    @property
    def on_device(self) -> bool:
        return not self.reasons


def route(
    needs: Sequence[tuple[Hashable, RowNeeds]],
    device: DeviceCapabilities,
    mode: SampleMode,
    phase: Phase,
    always_compat: bool = False,
) -> Route:
    """The route of a step over the rows that it samples."""
    rows = ((request, row_reasons(row, device, phase)) for request, row in needs)
    return route_rows(rows, device, mode, phase, always_compat)


def route_rows(
    rows: Iterable[tuple[Hashable, tuple[Reason, ...]]],
    device: DeviceCapabilities,
    mode: SampleMode,
    phase: Phase,
    always_compat: bool = False,
) -> Route:
    """As `route`, from blockers kept per request and phase: `rows` may be the items of a dictionary."""
    step = _step_reason(device, mode, phase, always_compat)
    if step is not None:
        return Route(((None, step),))
    return Route(tuple((request, reason) for request, blockers in rows for reason in blockers))


def row_reasons(needs: RowNeeds, device: DeviceCapabilities, phase: Phase) -> tuple[Reason, ...]:
    """What keeps one request off the device in `phase`; empty if nothing does.

    Ask again when a need changes, for instance when `min_tokens` is reached.
    """
    params = needs.params
    decode = phase is Phase.DECODE
    checks = (
        (Reason.TOP_K, not params.greedy and not _within(params.top_k, device.max_top_k)),
        (Reason.PENALTIES, params.penalised and not device.penalties),
        (Reason.PREFILL_PENALTIES, params.penalised and device.penalties and not decode),
        (Reason.SEED, not params.greedy and params.seed is not None and not device.seeds),
        (Reason.MIN_P, not params.greedy and params.min_p > 0 and not device.min_p),
        (Reason.LOGPROBS, not _has_logprobs(params.num_logprobs, device.logprobs)),
        (Reason.SAMPLED_LOGPROB, not _is_ranked(needs, device.logprobs)),
        (Reason.GRAMMAR, needs.grammar and not (device.grammar and decode)),
        (Reason.LOGIT_BIAS, needs.logit_bias and not device.logit_bias),
        (Reason.ALLOWED_TOKENS, needs.allowed_tokens and not device.allowed_tokens),
        (Reason.BAD_WORDS, needs.bad_words and not device.bad_words),
        (Reason.MIN_TOKENS, needs.min_tokens and not device.min_tokens),
        (Reason.STATEFUL_PROCESSORS, needs.stateful_processors and not device.stateful_processors),
    )
    return tuple(reason for reason, holds in checks if holds)


def _step_reason(
    device: DeviceCapabilities, mode: SampleMode, phase: Phase, always_compat: bool
) -> Reason | None:
    if mode is SampleMode.HOST:
        return Reason.HOST_MODE
    if always_compat:
        return Reason.ALWAYS_COMPAT
    if mode is SampleMode.DECODE_ONLY and phase is Phase.PREFILL:
        return Reason.PREFILL
    if not device.can_sample:
        return Reason.NO_DEVICE_SAMPLER
    return None


def _within(top_k: int, limit: int | None) -> bool:
    return limit is None or 1 <= top_k <= limit


def _has_logprobs(wanted: int, kind: DeviceLogprobs) -> bool:
    most = {DeviceLogprobs.NONE: NO_LOGPROBS, DeviceLogprobs.SAMPLED: 0, DeviceLogprobs.TOP32: TOP_LOGPROBS}
    return wanted == NO_LOGPROBS or 0 <= wanted <= most[kind]


def _is_ranked(needs: RowNeeds, kind: DeviceLogprobs) -> bool:
    """Whether the sampled token's rank among the raw logits is sure to be known.

    The argmax of unedited logits is the first; any other must be among the 32 that a device returns.
    """
    params = needs.params
    if kind is DeviceLogprobs.NONE or params.num_logprobs == NO_LOGPROBS:
        return True
    edited = (
        params.penalised
        or needs.grammar
        or needs.logit_bias
        or needs.allowed_tokens
        or needs.bad_words
        or needs.min_tokens
        or needs.stateful_processors
    )
    within = kind is DeviceLogprobs.TOP32 and 1 <= params.top_k <= TOP_LOGPROBS
    return not edited and (params.greedy or within)
