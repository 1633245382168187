"""The tensors of a decode step, kept from step to step, and those of a prefill step, made for it.

A row is written when its request arrives, when its blocks change, and when its token and position advance;
the rest of the tensors stays as it is.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from vllm_tt_plugin.images import PrefillImages
from vllm_tt_plugin.kv_cache import PageTables
from vllm_tt_plugin.requests import RequestState, RequestTable
from vllm_tt_plugin.step_data import DecodeInputs, PrefillInputs

Tokens = npt.NDArray[np.integer[Any]]
"""Sampled token ids, one for each request of a step."""


@attrs.frozen(eq=False)
class Decoding:
    """The requests of a decode, in the order of its plan. Never changed: a decode under way keeps its own."""

    names: list[str]
    index: dict[str, int]
    states: list[RequestState]
    outputs: list[list[int]]
    """The generated tokens of each."""
    rows: list[int]
    at: slice | npt.NDArray[np.intp]
    """The same rows, to index arrays with."""

    @classmethod
    def of(cls, states: list[RequestState]) -> "Decoding":
        names = [state.request_id for state in states]
        rows = [row_of(state) for state in states]
        index = {name: index for index, name in enumerate(names)}
        outputs = [state.output for state in states]
        return cls(names, index, states, outputs, rows, _index_of(rows))


class DecodeBatch:
    """Inputs of the next decode, row by row. Free rows and requests that are still in prefill hold -1.

    What an adapter was given never changes under it: a new step gets new tensors.
    """

    def __init__(self, rows: int, page_tables: PageTables) -> None:
        self._form = page_tables
        self._tokens = np.zeros((rows, 1), np.int32)
        self._positions = np.full(rows, -1, np.int32)
        self._advance = np.zeros(rows, np.int32)
        self._blocks = page_tables.empty(rows)
        self._show_blocks()
        self._followed_changes = -1
        self.decoding = Decoding.of([])

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
        at, states = self.decoding.at, self.decoding.states
        self._positions = np.full_like(self._positions, -1)
        self._positions[at] = [state.known - 1 for state in states]
        self._advance = np.zeros_like(self._positions)
        self._advance[at] = 1
        self._tokens = np.zeros_like(self._tokens)
        self._tokens[at, 0] = [(state.output or state.prompt)[-1] for state in states]
        return True

    def submitted(self) -> None:
        """Note that the device was given these inputs: the next ones stand a position further."""
        self._positions = self._positions + self._advance

    def sampled(self, decoding: Decoding, tokens: Tokens) -> list[int]:
        """Note the tokens of a decode, one for each of its requests. Returns them as a list."""
        self._tokens = self._tokens.copy()
        self._tokens[decoding.at, 0] = tokens
        as_list: list[int] = tokens.tolist()
        for output, token in zip(decoding.outputs, as_list, strict=True):
            output.append(token)
        return as_list

    def rope_deltas(self) -> list[int]:
        """Of each row up to the highest that decodes; 0 where nobody does."""
        deltas = [0] * (max(self.decoding.rows, default=-1) + 1)
        for state, row in zip(self.decoding.states, self.decoding.rows, strict=True):
            deltas[row] = state.rope_delta
        return deltas

    def inputs(self, rows: int, changed: bool = True) -> DecodeInputs:
        """Inputs of a decode over the first ``rows`` rows. ``changed``: what ``follow`` said."""
        if rows != self._height:
            self._page_table, self._height = self._page_tables[0][:rows], rows
        return DecodeInputs(
            tokens=torch.from_numpy(self._tokens[:rows]),
            start_pos=torch.from_numpy(self._positions[:rows]),
            page_table=self._page_table,
            page_tables_per_layer=self._per_layer,
            rope_deltas=self.rope_deltas() if changed else None,
        )


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


def _index_of(rows: list[int]) -> slice | npt.NDArray[np.intp]:
    """Rows that follow each other are a slice, with which NumPy is several times faster."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows, np.intp)


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
