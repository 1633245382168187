"""What a step takes on a device, and how that is fitted to measured steps."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from tt_scheduler.chunks import padded


@attrs.frozen
class SimStep:
    """What one step computes on the device, over all lanes."""

    prefills: tuple[int, ...] = ()
    """Tokens of each prompt's chunk."""
    decode_rows: int = 0
    changes_phase: bool = False
    """Whether it prefills after a decode or decodes after a prefill."""


def _not_negative() -> float:
    value: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    return value


@attrs.frozen(kw_only=True)
class Device:
    """A cost model: a prefill costs by its tokens, a decode by its rows, each with a fixed part.

    Chunks are padded to the smallest of ``padded_to`` that holds them, larger ones to a multiple of the
    largest; with none, they cost by their own length. All times are seconds.
    """

    prefill_fixed_s: float = _not_negative()
    """Of each prefill step."""
    prefill_token_s: float = _not_negative()
    decode_fixed_s: float = _not_negative()
    """Of each decode step."""
    decode_row_s: float = _not_negative()
    switch_s: float = _not_negative()
    """Added to a step that changes the phase."""
    recapture_s: float = _not_negative()
    """Added to the first step of each shape: its trace is captured then. 0 after a full warm-up."""
    padded_to: tuple[int, ...] = ()

    def padded(self, tokens: int) -> int:
        """The tokens that the device computes for a chunk of this length."""
        return padded(tokens, self.padded_to)

    def shapes(self, step: SimStep) -> set[int]:
        """The shapes that the step runs: padded lengths, and 0 for a decode."""
        return {self.padded(tokens) for tokens in step.prefills} | ({0} if step.decode_rows else set())

    def seconds(self, step: SimStep) -> float:
        """How long the step takes once its shapes are captured.

        A step with both phases is what a device would need that mixes them: the larger fixed part once,
        since weights are read once, and both variable parts.
        """
        fixed = max(
            self.prefill_fixed_s if step.prefills else 0.0, self.decode_fixed_s if step.decode_rows else 0.0
        )
        prefill = self.prefill_token_s * sum(map(self.padded, step.prefills))
        switch = self.switch_s if step.changes_phase else 0.0
        return fixed + prefill + self.decode_row_s * step.decode_rows + switch

    def fitted(self, measured: Iterable[tuple[SimStep, float]]) -> "Device":
        """This device with the five costs of a step that fit measured steps best, by least squares.

        The squares are of errors relative to the step, so that short steps count as much as long ones. A
        cost that would come out negative is 0, and so is one that the steps do not tell from others. Padding
        and recapture stay as they are. Raises ``ValueError`` without any measured step of a phase.
        """
        steps = list(measured)
        if not any(step.prefills for step, _ in steps) or not any(step.decode_rows for step, _ in steps):
            raise ValueError("a fit needs measured steps of both phases, prefill and decode")
        rows = [[term / seconds for term in self._terms(step)] for step, seconds in steps]
        costs = _least_squares(rows, [1.0] * len(rows))
        return attrs.evolve(
            self,
            prefill_fixed_s=costs[0],
            prefill_token_s=costs[1],
            decode_fixed_s=costs[2],
            decode_row_s=costs[3],
            switch_s=costs[4],
        )

    def _terms(self, step: SimStep) -> list[float]:
        tokens = sum(map(self.padded, step.prefills))
        return [bool(step.prefills), tokens, not step.prefills, step.decode_rows, step.changes_phase]


def read_measured(path: Path) -> list[tuple[SimStep, float]]:
    """Measured steps from JSON lines:
    ``{"prefills": [512], "decode_rows": 0, "changes_phase": true, "seconds": 0.3}``.

    Raises ``ValueError`` with the line's number if one is not of this form; ``OSError`` if it cannot be read.
    """
    steps = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            step = SimStep(tuple(entry["prefills"]), entry["decode_rows"], entry["changes_phase"])
            seconds = float(entry["seconds"])
            if seconds <= 0:
                raise ValueError("seconds is not above 0")
            steps.append((step, seconds))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {line[:100]!r} is no measured step ({error!r}); expected prefills,"
                " decode_rows, changes_phase and seconds"
            ) from error
    return steps


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The non-negative x that minimises |rows x - values|: drop the most negative term until none is left."""
    active = list(range(len(rows[0])))
    while True:
        kept = [[row[column] for column in active] for row in rows]
        solution = _normal_equations(kept, values)
        lowest = min(range(len(active)), key=solution.__getitem__, default=None)
        if lowest is None or solution[lowest] >= 0:
            found = dict(zip(active, solution, strict=True))
            return [found.get(column, 0.0) for column in range(len(rows[0]))]
        del active[lowest]


def _normal_equations(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares by Gauss and Jordan; a term that the rows do not determine is 0."""
    size = len(rows[0])
    scale = [max((abs(row[i]) for row in rows), default=0.0) or 1.0 for i in range(size)]
    scaled = [[row[i] / scale[i] for i in range(size)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [sum(row[i] * value for row, value in zip(scaled, values, strict=True))]
        for i in range(size)
    ]
    for column in range(size):
        pivot = matrix[column][column]
        if pivot < 1e-9 * len(rows):
            matrix[column] = [0.0] * (size + 1)
            continue
        matrix[column] = [entry / pivot for entry in matrix[column]]
        for i in range(size):
            if i != column and matrix[i][column]:
                factor = matrix[i][column]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[column], strict=True)]
    return [row[size] / unit for row, unit in zip(matrix, scale, strict=True)]
