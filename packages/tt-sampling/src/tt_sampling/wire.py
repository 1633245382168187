"""The record in which adapters receive sampling parameters, and how requests are packed into it."""

import dataclasses
from collections.abc import Sequence

import attrs

from tt_sampling.errors import ParamsError

NO_LOGPROBS = -2
TOP_LOGPROBS = 32  # what a device returns at most: (values [B, 32], ids [B, 32])
GREEDY_BELOW = 1e-5  # vLLM samples greedily under this temperature (_SAMPLING_EPS of its Sampler)


def is_greedy(temperature: float, top_k: int) -> bool:
    """Whether a row is an argmax. `top_k=1` is, whatever top-p, temperature and seed say."""
    return temperature < GREEDY_BELOW or top_k == 1


@attrs.frozen
class RowParams:
    """What one request asks of sampling; the defaults are those of vLLM's `SamplingParams`.

    `top_k` below 1 is unlimited. `num_logprobs`: -2 none, 0 the sampled token only, n > 0 the top n too,
    -1 the whole vocabulary (host only). `seed` is any integer of 64 bits, or None for fresh randomness.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    num_logprobs: int = NO_LOGPROBS

    @property
    def greedy(self) -> bool:
        return is_greedy(self.temperature, self.top_k)

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclasses.dataclass
class TTSamplingParams:
    """Sampling parameters of a batch, one list entry per row. A plain dataclass, because adapters call
    `dataclasses.fields` and `dataclasses.replace` on it.

    It has no min-p: rows that need it are sampled on the host. `num_logprobs` is -2 for none, 0 for the
    sampled token only, n > 0 for the top n; `enable_log_probs` says whether it is 0 or more.
    """

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    presence_penalty: list[float]
    frequency_penalty: list[float]
    repetition_penalty: list[float]
    seed: list[int | None]
    num_logprobs: list[int]
    enable_log_probs: list[bool]

    @classmethod
    def neutral(cls, batch: int) -> "TTSamplingParams":
        """`batch` padding rows: an argmax by temperature as well as by top-k, no penalties, no logprobs."""
        return cls(
            temperature=[0.0] * batch,
            top_k=[1] * batch,
            top_p=[1.0] * batch,
            presence_penalty=[0.0] * batch,
            frequency_penalty=[0.0] * batch,
            repetition_penalty=[1.0] * batch,
            seed=[None] * batch,
            num_logprobs=[NO_LOGPROBS] * batch,
            enable_log_probs=[False] * batch,
        )


def pack(rows: Sequence[RowParams | None], batch: int) -> TTSamplingParams:
    """The record for `batch` rows: row i carries `rows[i]`; None and rows past the end are neutral.

    Raises ParamsError for more rows than `batch`, and for logprobs that no device returns.
    """
    if len(rows) > batch:
        raise ParamsError(f"{len(rows)} rows given for a batch of {batch}; give at most {batch}")
    packed = TTSamplingParams.neutral(batch)
    for index, row in enumerate(rows):
        if row is None:
            continue
        _check_logprobs(index, row.num_logprobs)
        packed.temperature[index] = row.temperature
        packed.top_k[index] = row.top_k
        packed.top_p[index] = row.top_p
        packed.presence_penalty[index] = row.presence_penalty
        packed.frequency_penalty[index] = row.frequency_penalty
        packed.repetition_penalty[index] = row.repetition_penalty
        packed.seed[index] = row.seed
        packed.num_logprobs[index] = row.num_logprobs
        packed.enable_log_probs[index] = row.num_logprobs >= 0
    return packed


def _check_logprobs(index: int, count: int) -> None:
    if count != NO_LOGPROBS and not 0 <= count <= TOP_LOGPROBS:
        raise ParamsError(
            f"row {index} asks for num_logprobs={count}; the record carries {NO_LOGPROBS} (none) or "
            f"0..{TOP_LOGPROBS}; sample this row on the host"
        )
