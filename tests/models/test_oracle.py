"""The oracle notices what it is for: each kind of misuse raises, and right use gives the text it should."""

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from oracle_adapter import Oracle, OracleVersion0
from oracle_device import Timeline
from oracle_memory import OracleError, PagedMemory
from oracle_text import continuation
from transformers import LlamaConfig
from tt_sampling import TTSamplingParams

VOCAB, BLOCK, WIDTH, ROWS = 61, 4, 5, 4
STEADY = {
    "reload_inputs": False,
    "reload_page_table": False,
    "reload_sampling_params": False,
    "reset_sampling_state": False,
}
FIRST = STEADY | {"reload_inputs": True, "reload_sampling_params": True, "reset_sampling_state": True}


@attrs.define
class Use:
    """An oracle in use: prompts go into rows, and rows decode together."""

    model: Any = attrs.field(factory=lambda: Oracle(rows=ROWS, vocab=VOCAB, lanes=1, timeline=Timeline()))
    cache: Any = None
    known: dict[int, list[int]] = attrs.field(factory=dict)
    """Tokens by row."""
    pages: Any = attrs.field(factory=lambda: torch.zeros(ROWS, WIDTH, dtype=torch.int32))

    def __attrs_post_init__(self) -> None:
        self.cache = self.model.allocate_kv_cache((40, 1, BLOCK, 8), torch.float32, 1)
        for traced in (False, True):
            self.model.warmup_model_decode(
                kv_cache=self.cache,
                max_batch_size=ROWS,
                num_blocks=WIDTH,
                can_sample_on_device=True,
                enable_trace=traced,
            )

    def prefill(self, row: int, prompt: list[int], start: int = 0, **more: Any) -> None:
        self.pages[row] = torch.arange(WIDTH) + 1 + row * WIDTH
        blocks = self.pages[row : row + 1].clone()
        blocks[:, -(-len(prompt) // BLOCK) :] = 0
        arguments = {
            "tokens": torch.tensor([prompt], dtype=torch.int32),
            "page_table": blocks,
            "kv_cache": self.cache,
            "enable_trace": True,
            "prompt_lens": np.array([len(prompt)]),
            "start_pos": np.array([start], np.int32),
            "empty_slots": [row],
        }
        logits = self.model.prefill_forward(**arguments | more)
        self.known[row] = [*prompt, int(logits[0, -1].argmax())]

    def submit(self, commands: dict[str, bool] = FIRST, **more: Any) -> Any:
        tokens, positions = (
            torch.zeros(ROWS, 1, dtype=torch.int32),
            torch.full((ROWS,), -1, dtype=torch.int32),
        )
        for row, known in self.known.items():
            tokens[row], positions[row] = known[-1], len(known) - 1
        arguments = {
            "tokens": tokens,
            "page_table": self.pages.clone(),
            "kv_cache": self.cache,
            "start_pos": positions,
            "enable_trace": True,
            "read_from_device": False,
            "sampling_params": TTSamplingParams.neutral(ROWS),
        }
        return self.model.decode_forward(**arguments | commands | more)

    def read(self, handle: Any) -> None:
        out, events = self.model.read_decode_output(handle, async_read=True)
        for event in events:
            event.synchronize()
        ids = self.model.process_decode_output_host(out, is_tokens=True)
        for row, known in self.known.items():
            known.append(int(ids[row]))


@pytest.fixture
def use() -> Use:
    made = Use()
    made.prefill(0, [3, 1, 4, 1, 5])
    made.prefill(2, [9, 2])
    return made


def test_right_use_gives_its_text(use: Use) -> None:
    use.read(use.submit())
    first, second = use.submit(STEADY), use.submit(STEADY)
    use.read(first)
    use.read(second)
    assert use.known[0][5:] == continuation([3, 1, 4, 1, 5], 4, VOCAB)
    assert use.known[2][2:] == continuation([9, 2], 4, VOCAB)


def test_it_derives_nothing_without_a_command(use: Use) -> None:
    use.read(use.submit())
    nonsense = {"tokens": torch.full((ROWS, 1), 60, dtype=torch.int32)}
    use.read(use.submit(STEADY, **nonsense))
    assert use.known[0][5:] == continuation([3, 1, 4, 1, 5], 3, VOCAB)


def test_two_rows_on_one_block(use: Use) -> None:
    use.pages[2, 0] = use.pages[0, 1]
    with pytest.raises(OracleError, match="rows 0 and 2 both write block 2"):
        use.submit()


def test_a_block_of_another_request() -> None:
    memory = PagedMemory(blocks=3, block_size=4)
    blocks = np.array([2, 1])
    memory.write((0, 1), blocks, 0, [5, 6])
    memory.write((0, 1), blocks, 2, [7])
    for stranger in ((1, 1), (0, 2)):
        with pytest.raises(OracleError, match=r"write block 2 of \(0, 1\)"):
            memory.write(stranger, blocks, 3, [8])
    memory.write((0, 2), blocks, 0, [9])
    with pytest.raises(OracleError, match=r"write block 2 of \(0, 2\)"):
        memory.write((0, 1), blocks, 3, [8])


def test_a_page_table_that_leads_to_another_block(use: Use) -> None:
    use.pages[0, 0] = use.pages[2, 0]
    with pytest.raises(OracleError, match="row 0 finds positions"):
        use.submit()


def test_a_surplus_write_after_the_row_went_to_another(use: Use) -> None:
    stale = use.pages[0].clone()
    use.prefill(0, [7, 7])
    use.known[0] = [3, 1, 4, 1, 5, *continuation([3, 1, 4, 1, 5], 1, VOCAB)]
    use.pages[0] = stale
    with pytest.raises(OracleError, match="row 0 was left to another"):
        use.submit()


def test_a_read_of_a_block_that_nobody_wrote(use: Use) -> None:
    use.pages[0, 0] = 39
    with pytest.raises(OracleError, match=r"finds positions \[-1"):
        use.submit()


def test_a_prefill_that_trusts_a_prefix_that_is_not_there(use: Use) -> None:
    with pytest.raises(OracleError, match="finds positions"):
        use.prefill(1, [8, 8, 8, 8, 8], start=4)


def test_a_prefill_that_finds_another_prefix(use: Use) -> None:
    with pytest.raises(OracleError, match="are not those in its cache"):
        use.prefill(0, [3, 1, 4, 2, 5, 6], start=4)


def test_a_row_without_padding(use: Use) -> None:
    with pytest.raises(OracleError, match="not padded with 0"):
        use.model.prefill_forward(
            tokens=torch.tensor([[8, 8, 8], [1, 2, 6]], dtype=torch.int32),
            page_table=torch.tensor([[6, 0, 0, 0, 0], [16, 0, 0, 0, 0]], dtype=torch.int32),
            kv_cache=use.cache,
            enable_trace=True,
            prompt_lens=np.array([3, 2]),
            start_pos=np.zeros(2, np.int32),
            empty_slots=[1, 3],
        )


def test_a_trace_of_another_shape(use: Use) -> None:
    with pytest.raises(OracleError, match="a decode of 2 rows"):
        use.submit(
            tokens=torch.zeros(2, 1, dtype=torch.int32),
            start_pos=torch.full((2,), -1, dtype=torch.int32),
            page_table=torch.zeros(2, WIDTH, dtype=torch.int32),
        )
    untraced = Use()
    untraced.model._captured = set()
    with pytest.raises(OracleError, match="not captured"):
        untraced.submit()


def test_a_page_table_that_shrank(use: Use) -> None:
    use.read(use.submit())
    use.pages[0, 1:] = 0
    with pytest.raises(OracleError, match="shrank or moved"):
        use.submit(STEADY | {"reload_page_table": True})


def test_inputs_loaded_before_the_last_decode_was_read(use: Use) -> None:
    use.submit()
    with pytest.raises(OracleError, match="before them is unread"):
        use.submit()


def test_three_decodes_under_way(use: Use) -> None:
    use.submit()
    use.submit(STEADY)
    with pytest.raises(OracleError, match="nobody reads them"):
        use.submit(STEADY)


def test_reads_that_are_early_double_or_out_of_order(use: Use) -> None:
    first, second = use.submit(), use.submit(STEADY)
    with pytest.raises(OracleError, match="before its event"):
        use.model.process_decode_output_host(first, is_tokens=True)
    with pytest.raises(OracleError, match="before the one ahead"):
        use.read(second)
    use.read(first)
    with pytest.raises(OracleError, match="twice"):
        use.read(first)


def test_a_handle_is_not_ready_before_its_time() -> None:
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    timeline = Timeline(prefill_s=0.5, decode_s=0.25, clock=lambda: now[0], sleep=sleep)
    use = Use(model=Oracle(rows=ROWS, vocab=VOCAB, lanes=1, timeline=timeline))
    use.prefill(0, [1, 2])
    assert now[0] == 0.5
    first, second = use.submit(), use.submit(STEADY)
    assert now[0] == 0.5, "a decode is submitted without waiting"
    use.read(first)
    use.read(second)
    assert (now[0], slept) == (1.0, [0.5, 0.25, 0.25])


def test_a_configuration_says_how_long_the_device_takes() -> None:
    written = {"vocab_size": VOCAB, "oracle_prefill_ms": 30.0, "oracle_decode_ms": 4.0}
    config = LlamaConfig.from_dict(written)
    model: Any = Oracle.initialize_vllm_model(config, None, ROWS)
    assert (model._timeline.prefill_s, model._timeline.decode_s) == (0.03, 0.004)


def test_a_history_that_misses_a_token(use: Use) -> None:
    outputs = torch.full((ROWS, 1), -1, dtype=torch.int32)
    prompts = torch.full((ROWS, 5), -1, dtype=torch.int32)
    prompts[0], prompts[2, :2] = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2])
    with pytest.raises(OracleError, match="has a history of 5 tokens"):
        use.submit(prompt_tokens=prompts, output_tokens=outputs)


def test_a_host_sampled_decode_needs_its_inputs(use: Use) -> None:
    with pytest.raises(OracleError, match="without reload_inputs"):
        use.submit(STEADY, sampling_params=None)


def test_version_0_goes_on_alone_until_reset() -> None:
    use = Use(model=OracleVersion0(rows=ROWS, vocab=VOCAB, lanes=1, timeline=Timeline()))
    use.prefill(0, [3, 1, 4])
    use.read(use.submit({}, reset_batch=True))
    use.read(use.submit({}, reset_batch=False, tokens=torch.full((ROWS, 1), 60, dtype=torch.int32)))
    assert use.known[0][3:] == continuation([3, 1, 4], 3, VOCAB)
    with pytest.raises(OracleError, match="with device sampling alone"):
        use.submit({}, sampling_params=None, reset_batch=True)
