"""Requests that arrive over time: synthetic, or recorded as JSON lines."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs


@attrs.frozen(order=True)
class Arrival:
    """One request: when it comes, in seconds from the start, and its tokens in and out.

    Raises ``ValueError`` if it comes before the start or has no token on either side.
    """

    at_s: float = attrs.field(validator=attrs.validators.ge(0), converter=float)
    prompt_tokens: int = attrs.field(validator=attrs.validators.ge(1))
    output_tokens: int = attrs.field(validator=attrs.validators.ge(1))


def chat_mix(requests: int = 120, per_s: float = 1.0, seed: int = 0) -> list[Arrival]:
    """People chatting: Poisson arrivals, prompts of about 400 tokens with a long tail, answers of about 200.

    The lengths are log-normal, an estimate of the usual chat logs, cut at 8,000 and 1,000 tokens.
    """
    dice = random.Random(seed)
    clock, arrivals = 0.0, []
    for _ in range(requests):
        clock += dice.expovariate(per_s)
        prompt = min(8000, max(16, round(dice.lognormvariate(6.0, 1.0))))
        output = min(1000, max(8, round(dice.lognormvariate(5.2, 0.7))))
        arrivals.append(Arrival(clock, prompt, output))
    return arrivals


def bursts(count: int = 4, size: int = 16, every_s: float = 30.0, seed: int = 0) -> list[Arrival]:
    """Every ``every_s`` seconds ``size`` requests at once, with 500 to 4,000 tokens in and 150 to 300 out."""
    dice = random.Random(seed)
    return [
        Arrival(burst * every_s, dice.randint(500, 4000), dice.randint(150, 300))
        for burst in range(count)
        for _ in range(size)
    ]


def long_prompts(
    running: int = 24, longs: int = 8, long_tokens: int = 16384, at_s: float = 3.0
) -> list[Arrival]:
    """``running`` chats of 128 tokens in and 600 out, and long prompts that come into their decode."""
    chats = [Arrival(0.0, 128, 600) for _ in range(running)]
    return chats + [Arrival(at_s, long_tokens, 200) for _ in range(longs)]


def saturating(requests: int = 128, per_s: float = 2.0, seed: int = 48) -> list[Arrival]:
    """More than a T3K can serve: prompts of 1,024 tokens, three in a hundred of 14,336, about 450 out.

    With the T3K preset it comes near to the published effect of interleaving; see the readme.
    """
    dice = random.Random(seed)
    clock, arrivals = 0.0, []
    for _ in range(requests):
        clock += dice.expovariate(per_s)
        prompt = 14336 if dice.random() < 0.03 else 1024
        arrivals.append(Arrival(clock, prompt, round(450 * dice.uniform(0.7, 1.3))))
    return arrivals


TRACES: dict[str, Callable[[], list[Arrival]]] = {
    "chat": chat_mix,
    "bursts": bursts,
    "long-prompts": long_prompts,
    "saturating": saturating,
}
"""The synthetic traces by name, each with its defaults."""


def read_arrivals(path: Path) -> list[Arrival]:
    """Arrivals recorded as JSON lines: ``{"at_s": 0.5, "prompt_tokens": 100, "output_tokens": 20}``.

    Raises ``ValueError`` with the line's number if one is not of this form; ``OSError`` if it cannot be read.
    """
    arrivals = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            arrivals.append(Arrival(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {line[:100]!r} is no arrival ({error}); expected at_s, prompt_tokens"
                " and output_tokens"
            ) from error
    if not arrivals:
        raise ValueError(f"{path} holds no arrival; expected one JSON object on each line")
    return sorted(arrivals)


def write_arrivals(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write what ``read_arrivals`` reads."""
    path.write_text("".join(json.dumps(attrs.asdict(arrival)) + "\n" for arrival in arrivals))
