"""The executable definition of sampling, in plain torch on the CPU.

Order and arithmetic are those of vLLM 0.33's `Sampler` with its PyTorch kernels, to the bit, so that either
route gives a seeded or greedy request the same token. Shapes: B rows, V vocabulary, R those rows of the B
that the function in hand is about. A row's result depends on that row alone.
"""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from tt_sampling.errors import ParamsError, ShapeError
from tt_sampling.seeds import fresh_generator, step_generator
from tt_sampling.wire import TOP_LOGPROBS, TTSamplingParams, is_greedy

_NEVER = float("-inf")


@attrs.frozen(eq=False)
class Sampled:
    """One token for each row, and what was asked to be known about it.

    Logprobs are raw: log-softmax of the logits before anything is done to them. `logprobs` and `top` are
    None where no row asked; rows that did not ask hold NaN, and -1 for ids.
    """

    ids: Tensor
    """int64 [B]"""
    logprobs: Tensor | None = None
    """float32 [B], of the sampled token, where `num_logprobs` is 0 or more"""
    top: tuple[Tensor, Tensor] | None = None
    """(values float32 [B, T], ids int64 [B, T]), highest first, T = min(32, V), there too: it tells ranks"""


def sample(
    logits: Tensor,
    params: TTSamplingParams,
    positions: Sequence[int],
    prompt_tokens: Tensor | None = None,
    output_tokens: Tensor | None = None,
    *,
    min_p: Sequence[float] | None = None,
) -> Sampled:
    """Draw one token for each row; the arguments are left as they were.

    `logits` float32 [B, V]. `positions`: B positions of the tokens to be drawn, counted from the start of
    the prompt. `prompt_tokens` int [B, P] and `output_tokens` int [B, O], padded with -1, are read for rows
    with penalties only; without `output_tokens` nothing was generated yet. `min_p` stands apart because the
    record that adapters receive has none. Rows without a seed draw from the operating system's randomness.

    Raises ShapeError where row counts disagree, and ParamsError for penalties without `prompt_tokens` or
    more than 32 logprobs.
    """
    batch = _check(logits, params, positions, prompt_tokens, output_tokens, min_p)
    scores = penalise(logits, params, prompt_tokens, output_tokens)
    ids = scores.argmax(dim=-1)
    rows = [i for i in range(batch) if not is_greedy(params.temperature[i], params.top_k[i])]
    if rows:
        probs = probabilities(
            scores[rows],
            _pick(params.temperature, rows),
            _pick(params.top_k, rows),
            _pick(params.top_p, rows),
            _pick(min_p, rows) if min_p is not None else None,
        )
        ids[rows] = _race(probs, [_generator(params.seed[i], positions[i]) for i in rows])
    return _with_logprobs(ids, logits, params.num_logprobs)


def penalise(
    logits: Tensor,
    params: TTSamplingParams,
    prompt_tokens: Tensor | None,
    output_tokens: Tensor | None,
) -> Tensor:
    """Logits [B, V] after repetition, frequency and presence penalties; the same tensor if no row has any.

    Repetition counts prompt and output, and divides positive logits and multiplies others; frequency and
    presence count output only. Ids outside the vocabulary, such as the padding, count nowhere.
    """
    terms = zip(params.repetition_penalty, params.frequency_penalty, params.presence_penalty, strict=True)
    rows = [i for i, values in enumerate(terms) if values != (1.0, 0.0, 0.0)]
    if not rows:
        return logits
    if prompt_tokens is None:
        raise ParamsError(f"rows {rows} have penalties but prompt_tokens is None; pass the prompts' tokens")
    vocab = logits.shape[1]
    counts = _count(output_tokens[rows] if output_tokens is not None else None, len(rows), vocab)
    seen = (counts > 0) | (_count(prompt_tokens[rows], len(rows), vocab) > 0)
    part = logits[rows]
    repetition = torch.where(seen, _column(_pick(params.repetition_penalty, rows)), 1.0)
    part *= torch.where(part > 0, 1.0 / repetition, repetition)
    part -= _column(_pick(params.frequency_penalty, rows)) * counts
    part -= _column(_pick(params.presence_penalty, rows)) * (counts > 0)
    scores = logits.clone()
    scores[rows] = part
    return scores


def probabilities(
    scores: Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float] | None = None,
) -> Tensor:
    """What random rows draw from: float32 [R, V], after temperature, min-p, top-k and top-p, in that order.

    Tokens that tie with the k-th stay; top-p keeps the smallest set that reaches p, and at least one token.
    """
    vocab = scores.shape[1]
    scores = scores / _column(temperature)
    limits = [k if 1 <= k < vocab else vocab for k in top_k]
    nucleus = [i for i, p in enumerate(top_p) if p < 1.0]
    limited = [i for i, k in enumerate(limits) if k < vocab and top_p[i] >= 1.0]
    floors = [i for i, p in enumerate(min_p or ()) if p > 0.0]
    if min_p is not None:
        _rewrite(scores, floors, lambda part: _mask_min_p(part, _pick(min_p, floors)))
    _rewrite(scores, limited, lambda part: _mask_top_k(part, _pick(limits, limited)))
    _rewrite(scores, nucleus, lambda part: _mask_top_p(part, _pick(limits, nucleus), _pick(top_p, nucleus)))
    return scores.softmax(dim=-1)


def _mask_min_p(scores: Tensor, min_p: Sequence[float]) -> Tensor:
    probs = scores.softmax(dim=-1)
    floor = probs.amax(dim=-1, keepdim=True) * _column(min_p)
    return scores.masked_fill(probs < floor, _NEVER)


def _mask_top_k(scores: Tensor, top_k: Sequence[int]) -> Tensor:
    kth = scores.topk(max(top_k), dim=-1).values.gather(1, torch.tensor(top_k).unsqueeze(1) - 1)
    return scores.masked_fill(scores < kth, _NEVER)


def _mask_top_p(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Top-k inside one sort with top-p: a second sort could break ties differently."""
    ordered, order = scores.sort(dim=-1)
    kth = ordered.gather(1, scores.shape[1] - torch.tensor(top_k).unsqueeze(1))
    ordered.masked_fill_(ordered < kth, _NEVER)
    dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - _column(top_p)
    dropped[:, -1] = False
    return scores.scatter(1, order, ordered.masked_fill_(dropped, _NEVER))


def _race(probs: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Token ids [R]: with E exponential, the argmax of p / E falls on token t with probability p[t]."""
    noise = torch.empty_like(probs)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    return (probs / noise).argmax(dim=-1)


def _generator(seed: int | None, position: int) -> torch.Generator:
    return fresh_generator() if seed is None else step_generator(seed, position)


def _with_logprobs(ids: Tensor, logits: Tensor, wanted: Sequence[int]) -> Sampled:
    rows = [i for i, count in enumerate(wanted) if count >= 0]
    if not rows:
        return Sampled(ids)
    raw = logits[rows].log_softmax(dim=-1)
    logprobs = torch.full(ids.shape, float("nan"))
    logprobs[rows] = raw.gather(1, ids[rows].unsqueeze(1)).squeeze(1)
    width = min(TOP_LOGPROBS, logits.shape[1])
    values = torch.full((len(wanted), width), float("nan"))
    top_ids = torch.full((len(wanted), width), -1)
    values[rows], top_ids[rows] = raw.topk(width, dim=-1)
    return Sampled(ids, logprobs, (values, top_ids))


def _rewrite(scores: Tensor, rows: list[int], edit: Callable[[Tensor], Tensor]) -> None:
    if rows:
        scores[rows] = edit(scores[rows])


def _count(tokens: Tensor | None, rows: int, vocab: int) -> Tensor:
    """How often each id occurs: float32 [R, V], exact up to 2**24."""
    counts = torch.zeros(rows, vocab + 1)
    if tokens is not None:
        known = torch.where((tokens < 0) | (tokens >= vocab), vocab, tokens).long()
        counts.scatter_add_(1, known, torch.ones(known.shape))
    return counts[:, :vocab]


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def _pick[T](values: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [values[i] for i in rows]


def _check(
    logits: Tensor,
    params: TTSamplingParams,
    positions: Sequence[int],
    prompt_tokens: Tensor | None,
    output_tokens: Tensor | None,
    min_p: Sequence[float] | None,
) -> int:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ShapeError(
            f"logits are {logits.dtype} {list(logits.shape)}; give torch.float32 [rows, vocabulary]"
        )
    batch = logits.shape[0]
    lists = vars(params) | {"positions": positions, "prompt_tokens": prompt_tokens}
    lists |= {"output_tokens": output_tokens, "min_p": min_p}
    for name, rows in lists.items():
        if rows is not None and len(rows) != batch:
            raise ShapeError(f"{name} has {len(rows)} rows and the logits {batch}; give one entry per row")
    most = max(params.num_logprobs, default=0)
    if most > TOP_LOGPROBS:
        raise ParamsError(
            f"num_logprobs={most}; at most {TOP_LOGPROBS} are given; sample such rows on the host"
        )
    return batch
