"""What a device keeps between two decodes, and how outputs come back from it."""

import dataclasses
from concurrent.futures import Future

import torch
from torch import Tensor
from tt_sampling import TTSamplingParams

# Logits, or sampled ids and, where a row asked for logprobs, the highest of each row with their ids.
Output = tuple[Tensor, tuple[Tensor, Tensor] | None]


class Event:
    """Says that an output has arrived on the host; the runner waits for it before it asks for the output."""

    def __init__(self, output: Future[Output]) -> None:
        self._output = output

    def synchronize(self) -> None:
        self._output.result()


@dataclasses.dataclass(frozen=True)
class Resident:
    """The inputs and the sampling state of B rows. Only reload commands and sampled tokens change them."""

    tokens: Tensor  # [B] the next input of each row
    positions: Tensor  # [B] and its position; -1: nobody is in this row
    page_table: Tensor  # [B, W]
    params: TTSamplingParams
    prompt_tokens: Tensor | None = None  # [B, P] padded with -1; None where no row has a penalty
    output_tokens: Tensor | None = None  # [B, O]

    @classmethod
    def empty(cls, rows: int) -> "Resident":
        nobody = torch.full((rows,), -1)
        return cls(nobody, nobody, torch.zeros(rows, 0, dtype=torch.long), TTSamplingParams.neutral(rows))

    def at(self, rows: Tensor) -> "Resident":
        """Row i of the result is row `rows[i]` of this one."""
        tensors = {
            field.name: value[rows]
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        params = {name: [values[row] for row in rows.tolist()] for name, values in vars(self.params).items()}
        return dataclasses.replace(self, params=TTSamplingParams(**params), **tensors)

    def advanced(self, ids: Tensor) -> "Resident":
        """Live rows go on from the ids [B] that they sampled."""
        history = self.output_tokens
        return dataclasses.replace(
            self,
            tokens=ids,
            positions=self.positions + (self.positions >= 0),
            output_tokens=None if history is None else torch.cat((history, ids[:, None]), dim=1),
        )
