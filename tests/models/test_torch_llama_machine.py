"""Random requests through the reference bundle, held against transformers' forward of the whole sequence."""

from pathlib import Path

import attrs
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import LlamaForCausalLM
from tt_sampling import RowParams, pack, sample

from .torch_llama_driver import BLOCK_SIZE, VOCAB, WIDTH, Driver, make_checkpoint, reference

ROWS = 4
LONGEST = BLOCK_SIZE * WIDTH
tokens_of_vocab = st.integers(0, VOCAB - 1)


@attrs.define
class Request:
    """`tokens` are known; the cache holds the first `computed` of them."""

    tokens: list[int]
    params: RowParams
    prompt: int
    computed: int = 0
    blocks: list[int] = attrs.field(factory=list)

    @property
    def ready(self) -> bool:
        return self.computed == len(self.tokens) < LONGEST


class Machine(RuleBasedStateMachine):
    """A scheduler that does as it likes: any rows and chunks, shared prefixes, blocks used again at once."""

    def __init__(self, folder: Path, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.folder, self.model = folder, model
        self.requests: dict[int, Request] = {}

    @initialize(lanes=st.sampled_from([1, 2, 4]))
    def start(self, lanes: int) -> None:
        self.driver = Driver(self.folder, rows=ROWS, lanes=lanes)
        self.per_lane = ROWS // lanes
        self.free = [list(range(1, 1 + self.per_lane * WIDTH)) for _ in range(lanes)]

    def ready_rows(self) -> list[int]:
        return [row for row, request in self.requests.items() if request.ready]

    @precondition(lambda self: len(self.requests) < ROWS)
    @rule(
        data=st.data(),
        prompt=st.lists(tokens_of_vocab, min_size=1, max_size=20),
        seed=st.none() | st.integers(0, 1 << 63),
        penalty=st.sampled_from([1.0, 1.3]),
    )
    def admit(self, data: st.DataObject, prompt: list[int], seed: int | None, penalty: float) -> None:
        row = data.draw(st.sampled_from([row for row in range(ROWS) if row not in self.requests]))
        params = RowParams(
            temperature=0.0 if seed is None else 1.0,
            top_k=20,
            seed=seed,
            repetition_penalty=penalty,
            frequency_penalty=0.1,
        )
        request = Request(prompt, params, len(prompt))
        peers = [other for other in self.requests if other // self.per_lane == row // self.per_lane]
        donors: list[int | None] = [None, *peers]
        if (peer := data.draw(st.sampled_from(donors), label="prefix hit")) is not None:
            donor = self.requests[peer]
            hit = data.draw(st.integers(0, donor.computed // BLOCK_SIZE))
            request.tokens = (donor.tokens[: hit * BLOCK_SIZE] + prompt)[:LONGEST]
            request.computed = min(hit * BLOCK_SIZE, len(request.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
            request.blocks = donor.blocks[: request.computed // BLOCK_SIZE]
            request.prompt = len(request.tokens)
        self.requests[row] = request

    @precondition(lambda self: any(not request.ready for request in self.requests.values()))
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        unfinished = [row for row, request in self.requests.items() if request.computed < len(request.tokens)]
        if not unfinished:
            return
        rows = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        chunks = {}
        for row in rows:
            request = self.requests[row]
            end = data.draw(st.integers(request.computed + 1, len(request.tokens)), label="end of chunk")
            chunks[row] = (request.tokens[:end], request.computed)
            request.computed = end
            self.give_blocks(row)
        for logits, (tokens, _) in zip(self.driver.prefill(chunks), chunks.values(), strict=True):
            self.agree(logits[-1], tokens)

    @precondition(lambda self: self.ready_rows())
    @rule(data=st.data())
    def decode_for_the_host(self, data: st.DataObject) -> None:
        inputs = {}
        for row in data.draw(st.lists(st.sampled_from(self.ready_rows()), min_size=1, unique=True)):
            inputs[row] = self.append(row, data.draw(tokens_of_vocab))
        logits = self.driver.decode(inputs)
        for row in inputs:
            self.agree(logits[row, 0], self.requests[row].tokens)

    @precondition(lambda self: self.ready_rows())
    @rule(data=st.data(), steps=st.integers(1, 4))
    def decode_on_the_device(self, data: st.DataObject, steps: int) -> None:
        """One step that tells the device everything, then steady ones, told at most of new blocks."""
        rows = data.draw(st.lists(st.sampled_from(self.ready_rows()), min_size=1, unique=True))
        params = pack([self.requests[row].params if row in rows else None for row in range(ROWS)], ROWS)
        inputs = {row: self.append(row, data.draw(tokens_of_vocab)) for row in rows}
        commands = "inputs params state"
        for _ in range(steps):
            ids = self.driver.decode(inputs, commands, sampling_params=params, **self.histories(rows))
            for row in rows:
                self.check_token(row, int(ids[row]))
            if any(len(self.requests[row].tokens) == LONGEST for row in rows):
                return
            tables = self.driver.page_table.clone()
            for row in rows:
                self.append(row, int(ids[row]))
            commands = "" if torch.equal(tables, self.driver.page_table) else "table"
            inputs = dict.fromkeys(range(ROWS), (1, 1))
        for row in rows:  # the last token was sampled, and never computed
            self.requests[row].tokens.pop()
            self.requests[row].computed -= 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.requests)))
        gone = self.requests.pop(row)
        lane = row // self.per_lane
        held = {b for o, r in self.requests.items() if o // self.per_lane == lane for b in r.blocks}
        self.free[lane] += [block for block in gone.blocks if block not in held]
        self.driver.page_table[row] = 0

    @invariant()
    def the_null_block_stays_empty(self) -> None:
        if hasattr(self, "driver"):
            first = torch.arange(self.driver.lanes) * (len(self.driver.cache[0][0]) // self.driver.lanes)
            assert not self.driver.cache[0][0][first].any()

    def append(self, row: int, token: int) -> tuple[int, int]:
        request = self.requests[row]
        request.tokens.append(token)
        request.computed = len(request.tokens)
        self.give_blocks(row)
        return token, len(request.tokens) - 1

    def give_blocks(self, row: int) -> None:
        request = self.requests[row]
        while len(request.blocks) * BLOCK_SIZE < request.computed:
            request.blocks.append(self.free[row // self.per_lane].pop())
        self.driver.page_table[row] = 0
        self.driver.page_table[row, : len(request.blocks)] = torch.tensor(request.blocks)

    def histories(self, rows: list[int]) -> dict[str, torch.Tensor]:
        prompts = torch.full((ROWS, LONGEST), -1, dtype=torch.int32)
        outputs = prompts.clone()
        for row in rows:
            request = self.requests[row]
            prompts[row, : request.prompt] = torch.tensor(request.tokens[: request.prompt])
            output = request.tokens[request.prompt :]
            outputs[row, : len(output)] = torch.tensor(output)
        return {"prompt_tokens": prompts, "output_tokens": outputs}

    def agree(self, logits: torch.Tensor, tokens: list[int]) -> None:
        torch.testing.assert_close(logits, reference(self.model, tokens), atol=2e-4, rtol=2e-4)

    def check_token(self, row: int, token: int) -> None:
        """The token is the one that the host's sampler draws from transformers' logits.

        Where it is not, the host's draw must hang on a difference below 1e-4 between two logits.
        """
        request = self.requests[row]
        logits = reference(self.model, request.tokens)
        prompt, output = (rows[[row]] for rows in self.histories([row]).values())
        params, at = pack([request.params], 1), [len(request.tokens)]
        if int(sample(logits[None], params, at, prompt, output).ids) != token:
            logits[token] += 1e-4
            assert int(sample(logits[None], params, at, prompt, output).ids) == token


def test_any_order_of_requests_agrees_with_transformers(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    run_state_machine_as_test(  # takes any factory, though its annotation says class
        lambda: Machine(tmp_path, model),  # type: ignore[arg-type]
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
