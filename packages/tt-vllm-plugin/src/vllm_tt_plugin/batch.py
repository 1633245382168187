"""The tensors of a decode step and of a prefill step.

A row of the decodes' page tables is written when its request arrives or its blocks change. Tokens and
positions are written out when a model reads them; one that keeps its own gets the old ones again.
"""

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from vllm_tt_plugin.images import PrefillImages
from vllm_tt_plugin.kv_cache import PageTables
from vllm_tt_plugin.requests import RequestState, RequestTable
from vllm_tt_plugin.step_data import DecodeInputs, PrefillInputs


@attrs.frozen(eq=False)
class Decoding:
    """The requests of a decode, in the order of its plan. Never changed: a decode under way keeps its own."""

    names: list[str]
    index: dict[str, int]
    states: list[RequestState]
    rows: list[int]
    _outputs: list[list[int]]

    @classmethod
    def of(cls, states: list[RequestState]) -> "Decoding":
        names = [state.request_id for state in states]
        index = {name: index for index, name in enumerate(names)}
        rows = [row_of(state) for state in states]
        return cls(names, index, states, rows, [state.output for state in states])

    def sampled(self, by_row: list[int]) -> list[int]:
        """Note the tokens that were sampled, one for each row. Returns those of its requests."""
        tokens = [by_row[row] for row in self.rows]
        for output, token in zip(self._outputs, tokens, strict=True):
            output.append(token)
        return tokens


class DecodeBatch:
    """Who decodes, and what the next decode is given.

    What an adapter was given never changes under it: new values come in new tensors.
    """

    def __init__(self, rows: int, page_tables: PageTables) -> None:
        self._form = page_tables
        self._blocks = page_tables.empty(rows)
        self._followed_changes = -1
        self._given: DecodeInputs | None = None
        self.decoding = Decoding.of([])
        self._show_blocks()

    def write_blocks(self, changed: Sequence[RequestState], freed: Sequence[int] = ()) -> None:
        """Clear the rows ``freed``, then copy the block lists of ``changed`` into the page tables."""
        if not changed and not freed:
            return
        for row in freed:
            self._blocks[:, row] = 0
        for state in changed:
            if state.row is not None:
                _write_row(self._blocks, state.row, state)
        self._show_blocks()

    def _show_blocks(self) -> None:
        self._page_tables = list(torch.from_numpy(self._blocks.copy()))
        self._per_layer = self._form.per_layer(self._page_tables)
        self._page_table, self._height = self._page_tables[0], len(self._blocks[0])

    def follow(self, names: Iterable[str], requests: RequestTable) -> bool:
        """Make ``names`` the requests that decode. Returns whether anything changed but their last tokens."""
        names = list(names)
        if requests.changes == self._followed_changes and names == self.decoding.names:
            return False
        self._followed_changes = requests.changes
        self.decoding = Decoding.of([requests[name] for name in names])
        return True

    def inputs(self, rows: int, changed: bool = True, read: bool = True) -> DecodeInputs:
        """Inputs of a decode over the first ``rows`` rows.

        ``changed`` is what ``follow`` said. ``read``: whether the model reads tokens and positions; if not,
        they stay as they were last read, and most often nothing at all is new.
        """
        if rows != self._height:
            self._page_table, self._height = self._page_tables[0][:rows], rows
        given = self._given
        if given is None or read:
            tokens, positions = self._tokens_and_positions(rows)
        elif given.page_table is self._page_table and given.rope_deltas is None:
            return given
        else:
            tokens, positions = given.tokens, given.start_pos
        deltas = self._rope_deltas() if changed else None
        self._given = DecodeInputs(tokens, positions, self._page_table, self._per_layer, deltas)
        return self._given

    def _tokens_and_positions(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Free rows and requests that are still in prefill stand at -1."""
        tokens, positions = [0] * rows, [-1] * rows
        for state, row in zip(self.decoding.states, self.decoding.rows, strict=True):
            tokens[row] = (state.output or state.prompt)[-1]
            positions[row] = state.known - 1
        tokens_array = np.array(tokens, np.int32)[:, None]
        return torch.from_numpy(tokens_array), torch.from_numpy(np.array(positions, np.int32))

    def _rope_deltas(self) -> list[int]:
        """Of each row up to the highest that decodes; 0 where nobody does."""
        deltas = [0] * (max(self.decoding.rows, default=-1) + 1)
        for state, row in zip(self.decoding.states, self.decoding.rows, strict=True):
            deltas[row] = state.rope_delta
        return deltas


def prefill_inputs(
    chunks: Sequence[tuple[RequestState, int]], page_tables: PageTables, capacity: int
) -> PrefillInputs:
    """Inputs for chunks, each a request and how many of its tokens to compute from where it stands.

    Page tables by layer have ``capacity`` rows, of which the first are those of the chunks.
    """
    ends = [state.computed + count for state, count in chunks]
    tokens = np.zeros((len(chunks), max(ends)), np.int32)
    blocks = page_tables.empty(capacity)
    for index, ((state, _), end) in enumerate(zip(chunks, ends, strict=True)):
        tokens[index, :end] = state.tokens(end)
        _write_row(blocks, index, state)
    tables = list(torch.from_numpy(blocks))
    return PrefillInputs(
        tokens=torch.from_numpy(tokens),
        page_table=tables[0][: len(chunks)],
        prompt_lens=np.array(ends, np.int64),
        start_pos=np.array([state.computed for state, _ in chunks], np.int32),
        empty_slots=[row_of(state) for state, _ in chunks],
        page_tables_per_layer=page_tables.per_layer(tables),
        images=PrefillImages.of((state.images, end) for (state, _), end in zip(chunks, ends, strict=True)),
    )


def _write_row(tables: npt.NDArray[np.int32], row: int, state: RequestState) -> None:
    for table, blocks in zip(tables, state.blocks, strict=True):
        table[row] = 0
        table[row, : len(blocks)] = blocks


def row_of(state: RequestState) -> int:
    """The row that a request in a step must hold."""
    assert state.row is not None, f"{state.request_id} is in a step without a row"
    return state.row


def history(lists: Sequence[list[int]], rows: int) -> torch.Tensor:
    """Tokens by row, for the device's penalties: int32 ``[rows, longest]``, padded with -1."""
    padded = np.full((rows, max((len(tokens) for tokens in lists), default=0)), -1, np.int32)
    for index, tokens in enumerate(lists):
        padded[index, : len(tokens)] = tokens
    return torch.from_numpy(padded)
