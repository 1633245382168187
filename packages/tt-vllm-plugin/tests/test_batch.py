import torch
from tt_scheduler import Phase
from vllm_tt_plugin.batch import DecodeBatch, history, prefill_inputs
from vllm_tt_plugin.kv_cache import PageTables
from vllm_tt_plugin.requests import RequestState, RequestTable

from .plans import Planner, Told, greedy

ROWS, WIDTH = 5, 4
NAMES = ["r0", "r1", "r3"]


def three_decoding() -> tuple[RequestTable, list[RequestState]]:
    """Requests r0, r1 and r3 in rows 0, 1 and 3; row 2 was freed again, row 4 never held."""
    table, planner = RequestTable(ROWS), Planner(ROWS, 40)
    told = [Told(f"r{n}", [10 * n + i for i in range(n + 1)], greedy()) for n in range(4)]
    table.apply(planner.step(Phase.PREFILL, [(r, len(r.prompt)) for r in told]))
    for request in told:
        table[request.name].computed = len(request.prompt)
        table[request.name].output.append(90 + len(request.prompt))
    planner.finish(told[2])
    table.apply(planner.step(Phase.EMPTY, []))
    return table, [state for state in table.by_row if state is not None]


def test_rows_are_sparse_and_the_rest_is_neutral() -> None:
    table, states = three_decoding()
    batch = DecodeBatch(ROWS, PageTables(WIDTH))
    batch.write_blocks(states)
    assert batch.follow(NAMES, table) is True
    inputs = batch.inputs(ROWS)
    assert inputs.tokens.tolist() == [[91], [92], [0], [94], [0]]
    assert inputs.start_pos.tolist() == [1, 2, -1, 4, -1]
    assert (inputs.tokens.dtype, inputs.start_pos.dtype, inputs.page_table.dtype) == 3 * (torch.int32,)
    for row in (0, 1, 3):
        state = table.by_row[row]
        assert state is not None
        assert inputs.page_table[row].tolist() == state.blocks[0] + [0] * (WIDTH - len(state.blocks[0]))
    assert batch.decoding.rows == [0, 1, 3]
    assert batch.decoding.states == states
    assert batch.decoding.index == {"r0": 0, "r1": 1, "r3": 2}
    assert [tensor.shape[0] for tensor in (batch.inputs(4).tokens, batch.inputs(4).page_table)] == [4, 4]


def test_sampled_tokens_move_only_rows_that_decode() -> None:
    table, _ = three_decoding()
    batch = DecodeBatch(ROWS, PageTables(WIDTH))
    batch.follow(NAMES, table)
    assert batch.decoding.sampled([5, 6, 99, 7, 98]) == [5, 6, 7]
    assert batch.follow(NAMES, table) is False
    inputs = batch.inputs(ROWS)
    assert inputs.tokens.tolist() == [[5], [6], [0], [7], [0]]
    assert inputs.start_pos.tolist() == [2, 3, -1, 5, -1]


def test_a_model_that_reads_nothing_gets_what_it_had() -> None:
    table, states = three_decoding()
    batch = DecodeBatch(ROWS, PageTables(WIDTH))
    batch.write_blocks(states)
    batch.follow(NAMES, table)
    first = batch.inputs(ROWS)
    assert first.rope_deltas == [0, 0, 0, 0]
    batch.decoding.sampled([5, 6, 0, 7])
    steady = batch.inputs(ROWS, changed=False, read=False)
    assert (steady.tokens is first.tokens, steady.start_pos is first.start_pos) == (True, True)
    assert steady.rope_deltas is None
    assert batch.inputs(ROWS, changed=False, read=False) is steady
    states[0].blocks[0].append(33)
    batch.write_blocks([states[0]])
    fresh = batch.inputs(ROWS, changed=False, read=False)
    assert fresh.page_table[0].tolist() == [*states[0].blocks[0], 0, 0]
    assert fresh.tokens is first.tokens
    assert batch.inputs(ROWS, changed=False).tokens[0].tolist() == [5]


def test_a_smaller_set_of_decodes_is_a_change() -> None:
    table, _ = three_decoding()
    batch = DecodeBatch(ROWS, PageTables(WIDTH))
    batch.follow(NAMES, table)
    assert batch.follow(NAMES[1:], table) is True
    assert batch.inputs(ROWS).start_pos.tolist() == [-1, 2, -1, 4, -1]


def test_a_request_that_came_back_is_written_anew() -> None:
    """The same names in the same order, but preempted and resumed by a prefill in between."""
    table, planner, request = RequestTable(ROWS), Planner(ROWS, 40), Told("r0", [1, 2], greedy())
    batch = DecodeBatch(ROWS, PageTables(WIDTH))
    table.apply(planner.step(Phase.PREFILL, [(request, 2)]))
    table["r0"].computed = 2
    table["r0"].output.append(8)
    request.output.append(8)
    assert batch.follow(["r0"], table) is True
    planner.preempt(request)
    table.apply(planner.step(Phase.PREFILL, [(request, 3)]))
    table["r0"].computed = 3
    table["r0"].output.append(9)
    table.apply(planner.step(Phase.DECODE, []))
    assert batch.follow(["r0"], table) is True
    assert (batch.inputs(1).tokens.tolist(), batch.inputs(1).start_pos.tolist()) == ([[9]], [3])


def test_what_was_handed_out_never_changes() -> None:
    table, states = three_decoding()
    batch = DecodeBatch(ROWS, PageTables(WIDTH))
    batch.write_blocks(states)
    batch.follow(NAMES, table)
    given = batch.inputs(ROWS)
    kept = [tensor.clone() for tensor in (given.tokens, given.start_pos, given.page_table)]
    states[0].blocks[0].append(33)
    batch.write_blocks([states[0]])
    batch.decoding.sampled([5, 6, 0, 7])
    batch.follow(NAMES[:1], table)
    batch.inputs(ROWS)
    for tensor, before in zip((given.tokens, given.start_pos, given.page_table), kept, strict=True):
        assert torch.equal(tensor, before)
    assert batch.inputs(ROWS).page_table[0].tolist() == [*states[0].blocks[0], 0, 0]


def test_a_shorter_block_list_leaves_nothing_behind() -> None:
    _, states = three_decoding()
    batch = DecodeBatch(ROWS, PageTables(WIDTH))
    states[2].blocks = ([7, 8, 9],)
    batch.write_blocks([states[2]])
    states[2].blocks = ([5],)
    batch.write_blocks([states[2]])
    assert batch.inputs(ROWS).page_table[3].tolist() == [5, 0, 0, 0]


def test_prefill_inputs_name_where_each_chunk_ends() -> None:
    table, planner = RequestTable(ROWS), Planner(ROWS, 40)
    a, b = Told("a", [1, 2, 3, 4, 5, 6], greedy()), Told("b", [7, 8], greedy(), output=[9])
    table.apply(planner.step(Phase.PREFILL, [(a, 2), (b, 2)]))
    table["b"].output.append(9)
    table["a"].computed = 2
    inputs = prefill_inputs([(table["a"], 3), (table["b"], 3)], PageTables(WIDTH), ROWS)
    assert inputs.tokens.tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 0, 0]]
    assert inputs.prompt_lens.tolist() == [5, 3]
    assert inputs.start_pos.tolist() == [2, 0]
    assert inputs.empty_slots == [0, 1]
    assert [str(array.dtype) for array in (inputs.prompt_lens, inputs.start_pos)] == ["int64", "int32"]
    assert (inputs.tokens.dtype, inputs.page_table.dtype) == (torch.int32, torch.int32)
    assert inputs.page_table.shape == (2, WIDTH)
    assert inputs.page_table[1].tolist() == [*table["b"].blocks[0], 0, 0, 0]


def test_a_history_is_padded_with_minus_one() -> None:
    padded = history([[10, 11], [], [30]], rows=5)
    assert padded.tolist() == [[10, 11], [-1, -1], [30, -1], [-1, -1], [-1, -1]]
    assert padded.dtype == torch.int32
    assert history([[], []], rows=2).shape == (2, 0)
