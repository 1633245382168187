"""What transformers says must follow a prompt.

Two float32 implementations may differ in the last bits of a logit. Where the reference's two best logits lie
closer than NARROW, either token is right; such places are counted and reported, and the rest of that request,
which then continues another text, is not compared.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

NARROW = 1e-4


@attrs.frozen
class Reference:
    """What must follow a prompt by transformers, and how far apart the two best logits lie at each token."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]

    @classmethod
    def of(cls, model: Any, prompt: list[int], tokens: list[int], **inputs: Any) -> "Reference":
        """The greedy tokens, told by one pass over ``prompt`` and ``tokens``, as far as both are the same.

        Each token that is the best after all before it is the next that greedy search takes; so nothing has
        to be generated but what ``tokens`` already hold. ``inputs`` are what the model gets beside tokens.
        """
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]]), **inputs).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        greedy = best.indices[:, 0].tolist()
        place = next((i for i, (a, b) in enumerate(zip(tokens, greedy, strict=True)) if a != b), len(greedy))
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        return cls(prompt, greedy[: place + 1], margins)

    def compare(self, tokens: Sequence[int]) -> bool:
        """True if all tokens are equal, False if they part at a narrow place; fails elsewhere."""
        assert len(tokens) == len(self.margins)
        place = next((i for i, (a, b) in enumerate(zip(tokens, self.tokens, strict=False)) if a != b), None)
        if place is None:
            return len(self.tokens) == len(tokens)
        assert self.margins[place] < NARROW, (
            f"prompt of {len(self.prompt)}: token {place} is {tokens[place]}, not {self.tokens[place]},"
            f" which leads by {self.margins[place]:.2g}"
        )
        return False
