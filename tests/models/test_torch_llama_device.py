"""What the reference bundle keeps on its device: reload commands, sampling, and outputs read later."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from tt_sampling import RowParams, TTSamplingParams, pack, sample

from .torch_llama_driver import Driver, make_checkpoint, reference

EVERYTHING = "inputs params state"
PROMPTS = {0: [3, 1, 4, 1, 5], 2: [9, 2, 6], 3: [5, 3, 5, 8, 9, 7, 9]}
GREEDY = TTSamplingParams.neutral(4)
MIXED = pack(
    [
        RowParams(temperature=0.8, seed=7),
        None,
        RowParams(temperature=1.5, top_k=9, top_p=0.9, seed=1 << 40, num_logprobs=0),
        RowParams(
            temperature=0.7, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, seed=3
        ),
    ],
    4,
)
STALE = dict.fromkeys(range(4), (59, 1))  # what the host must not be believed in a steady decode


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_checkpoint(folder)


@pytest.fixture
def driver(checkpoint: tuple[Path, LlamaForCausalLM]) -> Driver:
    driver = Driver(checkpoint[0])
    driver.prefill({row: (tokens, 0) for row, tokens in PROMPTS.items()})
    return driver


@pytest.fixture(scope="module")
def model(checkpoint: tuple[Path, LlamaForCausalLM]) -> LlamaForCausalLM:
    return checkpoint[1]


def first_inputs(token: int = 11) -> dict[int, tuple[int, int]]:
    return {row: (token, len(tokens)) for row, tokens in PROMPTS.items()}


def greedy(model: LlamaForCausalLM, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(reference(model, tokens).argmax()))
    return tokens[-count:]


def padded(rows: dict[int, list[int]]) -> torch.Tensor:
    table = torch.full((4, max(len(tokens) for tokens in rows.values()) + 1), -1, dtype=torch.int32)
    for row, tokens in rows.items():
        table[row, : len(tokens)] = torch.tensor(tokens)
    return table


def test_steady_decodes_go_on_from_the_device_alone(driver: Driver, model: LlamaForCausalLM) -> None:
    steps = [driver.decode(first_inputs(), EVERYTHING, sampling_params=GREEDY)]
    driver_table = driver.page_table
    driver.page_table = torch.full_like(driver_table, 70)
    nonsense = pack([RowParams(seed=1, temperature=9.0)] * 4, 4)
    steps += [driver.decode(STALE, "", sampling_params=nonsense) for _ in range(5)]
    for row, tokens in PROMPTS.items():
        assert [int(ids[row]) for ids in steps] == greedy(model, [*tokens, 11], 6)
    assert all(int(ids[1]) == -1 for ids in steps)


def test_reload_page_table_takes_the_table_and_nothing_else(driver: Driver, model: LlamaForCausalLM) -> None:
    table = driver.page_table.clone()
    driver.page_table[:, 2:] = 70  # not allocated yet
    steps = [driver.decode(first_inputs(), EVERYTHING, sampling_params=GREEDY)]
    driver.page_table = table
    steps += [driver.decode(STALE, "table", sampling_params=GREEDY)]
    driver.page_table = torch.full_like(table, 70)
    steps += [driver.decode(STALE, "", sampling_params=GREEDY) for _ in range(4)]
    tokens = PROMPTS[3]
    assert [int(ids[3]) for ids in steps] == greedy(model, [*tokens, 11], 6)


def test_reload_inputs_takes_what_the_host_says(driver: Driver, model: LlamaForCausalLM) -> None:
    driver.decode(first_inputs(), EVERYTHING, sampling_params=GREEDY)
    ids = driver.decode({3: (20, 7)}, "inputs", sampling_params=GREEDY)
    assert int(ids[3]) == greedy(model, [*PROMPTS[3], 20], 1)[0]
    assert ids[:3].tolist() == [-1, -1, -1]


def test_resetting_the_sampling_state_takes_the_inputs_too(driver: Driver, model: LlamaForCausalLM) -> None:
    driver.decode(first_inputs(), EVERYTHING, sampling_params=GREEDY)
    ids = driver.decode({3: (20, 7)}, "params state", sampling_params=GREEDY)
    assert ids.tolist() == [-1, -1, -1, *greedy(model, [*PROMPTS[3], 20], 1)]


def test_sampling_parameters_change_only_when_commanded(driver: Driver, model: LlamaForCausalLM) -> None:
    ids = driver.decode(first_inputs(), EVERYTHING, sampling_params=GREEDY)
    expected = int(ids[0])
    assert expected == greedy(model, [*PROMPTS[0], 11], 1)[0]
    hot = pack([RowParams(temperature=50.0, seed=5)] * 4, 4)
    again = driver.decode(first_inputs(), "inputs", sampling_params=hot)
    assert int(again[0]) == expected
    logits = reference(model, [*PROMPTS[0], 11])[None]
    drawn = sample(logits, pack([RowParams(temperature=50.0, seed=5)], 1), [len(PROMPTS[0]) + 1])
    taken = driver.decode(first_inputs(), "inputs params", sampling_params=hot)
    assert int(taken[0]) == int(drawn.ids[0]) != expected


def test_the_host_route_uploads_no_parameters(driver: Driver, model: LlamaForCausalLM) -> None:
    driver.decode(first_inputs(), EVERYTHING, sampling_params=GREEDY)
    logits = driver.decode(first_inputs(), "inputs")
    torch.testing.assert_close(logits[0, 0], reference(model, [*PROMPTS[0], 11]), atol=1e-4, rtol=1e-4)
    ids = driver.decode(first_inputs(), EVERYTHING, sampling_params=GREEDY)
    assert int(ids[2]) == greedy(model, [*PROMPTS[2], 11], 1)[0]


def test_device_samples_what_the_host_would(driver: Driver, model: LlamaForCausalLM) -> None:
    """Seeds, top-k, top-p and penalties over eight steps; only the first tells the device anything."""
    outputs = {row: [11] for row in PROMPTS}
    for step in range(8):
        histories = {"prompt_tokens": padded(PROMPTS), "output_tokens": padded(outputs)}
        if step:
            histories = dict.fromkeys(histories, torch.full((4, 1), 2))
        ids, (logprobs, of) = driver.decode(
            first_inputs() if not step else STALE,
            EVERYTHING if not step else "",
            sampling_params=MIXED,
            **histories,
        )
        live = list(PROMPTS)
        known = {row: PROMPTS[row] + outputs[row] for row in live}
        logits = torch.full((4, 61), 0.0)
        for row in live:
            logits[row] = reference(model, known[row])
        positions = [len(known.get(row, [])) for row in range(4)]
        host = sample(logits, MIXED, positions, padded(PROMPTS), padded(outputs))
        assert ids[live].tolist() == host.ids[live].tolist()
        assert host.top is not None
        torch.testing.assert_close(logprobs[2], host.top[0][2], atol=1e-4, rtol=1e-4)
        assert of[2].tolist() == host.top[1][2].tolist()
        for row in live:
            outputs[row].append(int(ids[row]))


def test_a_prefill_may_be_sampled_on_the_device(driver: Driver, model: LlamaForCausalLM) -> None:
    rows = [RowParams(temperature=0.9, seed=4), RowParams(temperature=0.0, num_logprobs=0)]
    chunks = {2: ([1, 2, 3, 4, 5, 6], 0), 0: ([8, 8, 8], 0)}
    logits = torch.stack([reference(model, tokens) for tokens, _ in chunks.values()])
    host = sample(logits, pack(rows, 2), [6, 3])
    ids, (logprobs, of) = driver.prefill(chunks, sampling_params=pack(rows, 2))
    assert ids.tolist() == host.ids.tolist()
    assert host.top is not None
    torch.testing.assert_close(logprobs[1], host.top[0][1], atol=1e-4, rtol=1e-4)
    assert of[1].tolist() == host.top[1][1].tolist()
    plain = driver.prefill(chunks, sampling_params=pack([rows[0], None], 2))
    assert plain.tolist() == host.ids.tolist()


def test_slot_remap_gathers_everything_that_is_kept(driver: Driver, model: LlamaForCausalLM) -> None:
    histories = {"prompt_tokens": padded(PROMPTS), "output_tokens": padded({row: [11] for row in PROMPTS})}
    first, _ = driver.decode(first_inputs(), EVERYTHING, sampling_params=MIXED, **histories)
    stayed = Driver(Path(model.config._name_or_path))
    stayed.prefill({row: (tokens, 0) for row, tokens in PROMPTS.items()})
    stayed.decode(first_inputs(), EVERYTHING, sampling_params=MIXED, **histories)
    for step in range(4):
        remap = torch.tensor([3, 0, 1, 2], dtype=torch.int32) if not step else None
        moved, moved_logprobs = driver.decode(STALE, "", sampling_params=MIXED, slot_remap=remap)
        same, same_logprobs = stayed.decode(STALE, "", sampling_params=MIXED)
        assert moved.tolist() == same[[3, 0, 1, 2]].tolist()
        for there, here in zip(moved_logprobs, same_logprobs, strict=True):
            torch.testing.assert_close(there, here[[3, 0, 1, 2]], equal_nan=True)
    assert int(first[0]) != -1


def finish(driver: Driver, handle: Any, is_tokens: bool) -> Any:
    host, events = driver.adapter.read_decode_output(handle, async_read=True)
    for event in events:
        event.synchronize()
    return driver.adapter.process_decode_output_host(host, is_tokens=is_tokens)


def test_handles_are_read_later_while_the_host_overwrites_its_tensors(
    driver: Driver, model: LlamaForCausalLM
) -> None:
    table = driver.page_table
    call = {"sampling_params": GREEDY, "read_from_device": False}
    tokens = torch.tensor([[11], [0], [11], [11]], dtype=torch.int32)
    positions = torch.tensor([5, -1, 3, 7], dtype=torch.int32)
    handles = [driver.decode({}, EVERYTHING, tokens=tokens, start_pos=positions, **call)]
    for tensor in (tokens, positions, table):
        tensor.fill_(1)
    handles += [driver.decode(STALE, "", **call) for _ in range(5)]
    steps = [finish(driver, handle, is_tokens=True) for handle in handles]
    for row, prompt in PROMPTS.items():
        assert [int(ids[row]) for ids in steps] == greedy(model, [*prompt, 11], 6)


def test_logits_can_be_read_later_too(driver: Driver, model: LlamaForCausalLM) -> None:
    handle = driver.decode(first_inputs(), "inputs", read_from_device=False)
    logits = finish(driver, handle, is_tokens=False)
    assert logits.shape == (4, 1, 61)
    torch.testing.assert_close(logits[2, 0], reference(model, [*PROMPTS[2], 11]), atol=1e-4, rtol=1e-4)
    host = driver.adapter.read_decode_output(driver.decode(first_inputs(), "inputs", read_from_device=False))
    assert driver.adapter.process_decode_output_host(host, is_tokens=False).shape == (4, 1, 61)


def test_a_failure_on_the_device_comes_out_where_it_is_waited_for(driver: Driver) -> None:
    driver.page_table[0] = 10_000
    handle = driver.decode(first_inputs(), "inputs", read_from_device=False)
    with pytest.raises(IndexError):
        finish(driver, handle, is_tokens=False)
    driver.page_table[0] = torch.arange(1, 9)
    assert driver.decode(first_inputs(), "inputs")[0].isfinite().all()


def test_a_batch_without_anybody_samples_nothing(driver: Driver) -> None:
    assert driver.decode({}, EVERYTHING, sampling_params=GREEDY).tolist() == [-1] * 4
