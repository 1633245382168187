"""Checks of the ttnn Llama on a mock cluster, in a process of their own."""

import importlib
import tempfile
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import ttnn
from torch import Tensor
from transformers import AutoConfig
from tt_mock import Traced
from tt_mock.ttnn_shadows import Shadows
from tt_registry.bundles import read_bundle
from tt_registry.importing import BundleFinder
from tt_sampling import RowParams, TTSamplingParams, pack, ttnn_sampler

from tests.models.torch_llama_driver import make_checkpoint

from .checks import outcomes

BUNDLES = Path(__file__).parents[2] / "examples/models"
LAYERS, HEAD, BLOCK, WIDTH, ROWS, VOCAB = 2, 32, 32, 8, 4, 512
CAPACITY = BLOCK * WIDTH
STALE = 77
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "initializer_range": 0.2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
}


def bundle(name: str) -> Any:
    folder = BUNDLES / name
    BundleFinder([folder]).install()
    return read_bundle(folder).entries[0].load()


def loaded(name: str, folder: Path, mesh: Any, **settings: Any) -> Any:
    """The adapter of a bundle, as a runner loads it."""
    given = {"max_seq_len": CAPACITY, "max_batch_size": ROWS, "optimizations": None} | settings
    config = AutoConfig.from_pretrained(folder)
    return bundle(name).initialize_vllm_model(hf_config=config, mesh_device=mesh, **given)


def prompt(length: int) -> list[int]:
    drawn = torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(length))
    tokens: list[int] = drawn.tolist()
    return tokens


def stand_in(shadows: Traced) -> None:
    """Put `shadows` where the bundle and the sampler have ttnn."""
    package = bundle("ttnn-llama").__module__.rpartition(".")[0]
    for name in ("ttnn_adapter", "ttnn_model", "ttnn_inputs"):
        importlib.import_module(f"{package}.{name}").ttnn = shadows  # type: ignore[attr-defined]
    ttnn_sampler.ttnn = shadows  # type: ignore[attr-defined]


PROMPTS = {0: prompt(60), 1: prompt(3), 3: prompt(129)}  # by row: row 2 stays empty


class Driver:
    """An adapter with its cache, called as a runner calls it; each row has its own blocks, in any order."""

    def __init__(self, adapter: Any, heads: int, *, width: int = WIDTH) -> None:
        self.adapter, self.traced = adapter, False
        shape = (1 + ROWS * width, heads, BLOCK, HEAD)
        self.cache = adapter.allocate_kv_cache(shape, torch.bfloat16, LAYERS)
        blocks = torch.randperm(ROWS * width, generator=torch.Generator().manual_seed(1)) + 1
        self.page_table = blocks.reshape(ROWS, width).to(torch.int32)

    def warm_up(self) -> None:
        for traced in (False, True):
            self.adapter.already_warmed_up_prefill = False
            common = {"kv_cache": self.cache, "can_sample_on_device": True, "enable_trace": traced}
            self.adapter.warmup_model_prefill(**common)
            self.adapter.warmup_model_decode(max_batch_size=ROWS, num_blocks=WIDTH, **common)
        self.traced = True

    def prefill(self, row: int, tokens: list[int], start: int = 0, **extra: Any) -> Tensor:
        out: Tensor = self.adapter.prefill_forward(
            tokens=torch.tensor([tokens], dtype=torch.int32),
            page_table=self.page_table[row, None],
            kv_cache=self.cache,
            enable_trace=self.traced,
            prompt_lens=[len(tokens)],
            start_pos=[start],
            empty_slots=[row],
            **extra,
        )
        return out[0]

    def submit(self, texts: dict[int, list[int]], commands: str = "inputs", **extra: Any) -> Any:
        """A decode of the last token of each row. `commands`: of "inputs table params state", by space."""
        tokens = torch.full((ROWS, 1), STALE, dtype=torch.int32)
        positions = torch.full((ROWS,), -1, dtype=torch.int32)
        for row, text in texts.items():
            tokens[row], positions[row] = text[-1], len(text) - 1
        given = commands.split()
        out = self.adapter.decode_forward(
            tokens=tokens,
            page_table=self.page_table,
            kv_cache=self.cache,
            start_pos=positions,
            enable_trace=self.traced,
            read_from_device=False,
            reload_inputs="inputs" in given,
            reload_page_table="table" in given,
            reload_sampling_params="params" in given,
            reset_sampling_state="state" in given,
            **extra,
        )
        tokens.fill_(STALE)  # the call is over: the host may write to its tensors
        positions.fill_(STALE)
        return self.adapter.read_decode_output(out, async_read=True)

    def read(self, submitted: Any, is_tokens: bool = False) -> Tensor:
        handle, events = submitted
        for event in events:
            getattr(event, "synchronize", lambda event=event: ttnn.event_synchronize(event))()
        out: Tensor = self.adapter.process_decode_output_host(handle, is_tokens=is_tokens)
        assert len(out) == ROWS
        return out

    def greedy(self, prompts: dict[int, list[int]], count: int) -> dict[int, list[int]]:
        """By row, the prompt and what follows it, sampled on the host."""
        texts = {row: list(text) for row, text in prompts.items()}
        for row, text in texts.items():
            text.append(int(self.prefill(row, text)[-1].argmax()))
        for _ in range(count - 1):
            logits = self.read(self.submit(texts))
            for row, text in texts.items():
                text.append(int(logits[row, -1].argmax()))
        return texts


class Checks:
    """Methods are checks; the adapters of each are fresh."""

    def __init__(self, mesh: Any, folder: Path) -> None:
        self.mesh, self.folder, self.devices = mesh, folder, mesh.shape[1]
        self.shadows = Traced(Shadows(mesh))
        stand_in(self.shadows)

    def loaded(self, name: str = "ttnn-llama", **settings: Any) -> Any:
        return loaded(name, self.folder, self.mesh, **settings)

    @cached_property
    def config(self) -> Any:
        return AutoConfig.from_pretrained(self.folder)

    def driver(self, **settings: Any) -> Driver:
        width = settings.get("max_seq_len", CAPACITY) // BLOCK
        return Driver(self.loaded(**settings), self.config.num_key_value_heads // self.devices, width=width)

    def torch_driver(self, **settings: Any) -> Driver:
        width = settings.get("max_seq_len", CAPACITY) // BLOCK
        return Driver(self.loaded("torch-llama", **settings), 1, width=width)

    def check_logits_are_those_of_the_torch_bundle(self) -> None:
        ours, theirs = self.driver(), self.torch_driver()
        text = prompt(100)
        for end, start in ((50, 0), (70, 50), (100, 70), (100, 96), (100, 64)):
            logits = [driver.prefill(1, text[:end], start)[-1] for driver in (ours, theirs)]
            torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)
        for driver in (ours, theirs):
            driver.prefill(3, text[:31])
        for length in (31, 32, 33):
            texts = {1: text, 3: text[:length]}
            logits = [driver.read(driver.submit(texts))[[1, 3], -1] for driver in (ours, theirs)]
            torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)

    def check_greedy_text_is_that_of_the_torch_bundle(self) -> None:
        ours = self.driver()
        ours.warm_up()
        programs = self.mesh.num_program_cache_entries()
        assert ours.greedy(PROMPTS, 12) == self.torch_driver().greedy(PROMPTS, 12)
        assert self.mesh.num_program_cache_entries() == programs
        assert self.shadows.executed == [0] * 11

    def check_devices_go_on_from_what_they_sampled(self) -> None:
        """Two decodes are under way, as with async scheduling; the host's tensors are stale."""
        ours = self.driver()
        ours.warm_up()
        programs = self.mesh.num_program_cache_entries()
        texts = {row: list(text) for row, text in PROMPTS.items()}
        for row, text in texts.items():
            text.append(int(ours.prefill(row, text, sampling_params=TTSamplingParams.neutral(1))))
        params = TTSamplingParams.neutral(ROWS)
        whole = ours.page_table.clone()
        ours.page_table[0, 2] = whole[3, 0]  # row 0 must not write there, and comes to it in its fifth decode
        under_way = [ours.submit(texts, "inputs params state", sampling_params=params)]
        ours.page_table[:] = whole
        stale = {2: [STALE]}
        for step in range(11):
            if step < 10:
                under_way.append(ours.submit(stale, "table" if step == 2 else "", sampling_params=params))
            ids = ours.read(under_way.pop(0), is_tokens=True)
            for row, text in texts.items():
                text.append(int(ids[row]))
        assert texts == self.torch_driver().greedy(PROMPTS, 12)
        assert self.mesh.num_program_cache_entries() == programs
        assert self.shadows.executed == [1] * 11

    def check_random_rows_draw_from_what_is_left(self) -> None:
        ours = self.driver()
        logits, text = ours.prefill(0, prompt(40)), prompt(40)
        best = set(logits[-1].topk(5).indices.tolist())
        params = [pack([RowParams(temperature=5.0, top_k=5, seed=seed)], 1) for seed in range(12)]
        drawn = [int(ours.prefill(0, text, sampling_params=one)) for one in params]
        assert set(drawn) <= best
        assert len(set(drawn)) > 1
        assert int(ours.prefill(0, text, sampling_params=params[3])) == drawn[3]

    def check_seeds_belong_to_positions(self) -> None:
        """A steady decode counts them as the host would tell them."""
        ours = self.driver()
        drawn = []
        for seed, steady in ((7, False), (7, True), (8, True)):
            params = pack([RowParams(temperature=5.0, top_k=20, seed=seed)] * 2, ROWS)
            text = prompt(9)
            ours.prefill(1, text)
            for step in range(4):
                commands = "" if step and steady else "inputs params state"
                ids = ours.read(ours.submit({1: text}, commands, sampling_params=params), is_tokens=True)
                text.append(int(ids[1]))
            drawn.append(text)
        assert drawn[0] == drawn[1]
        assert drawn[1] != drawn[2]

    def check_long_prompts_go_in_several_chunks(self) -> None:
        ours, theirs = self.driver(max_seq_len=2112), self.torch_driver(max_seq_len=2112)
        text = prompt(2100)
        logits = [driver.prefill(2, text)[-1] for driver in (ours, theirs)]
        torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)

    def check_what_it_cannot_serve_is_refused(self) -> None:
        refused("'fast'", lambda: self.loaded(optimizations="fast"))
        refused("33 rows in 1 lanes", lambda: self.loaded(max_batch_size=33))
        refused("4 rows in 2 lanes", lambda: self.loaded(tt_data_parallel=2))
        refused(
            "block size is 16", lambda: self.loaded().allocate_kv_cache((8, 1, 16, 32), torch.bfloat16, 1)
        )

    def check_a_checkpoint_that_it_does_not_know_is_refused(self) -> None:
        for name, value, told in (
            ("attention_bias", True, "it has biases"),
            ("head_dim", 48, "head_dim is 48; expected 32 or a multiple of 64"),
            ("vocab_size", 33, f"vocab_size is 33; expected a multiple of {32 * self.devices}"),
            ("num_hidden_layers", LAYERS + 1, f"lacks 'model.layers.{LAYERS}."),
            ("rope_parameters", {"rope_type": "dynamic"}, "rope_type is 'dynamic'"),
        ):
            config = AutoConfig.from_pretrained(self.folder)
            setattr(config, name, value)
            load = partial(bundle("ttnn-llama").initialize_vllm_model, config, self.mesh, ROWS)
            refused(told, load)

    def check_performance_makes_the_weights_small(self) -> None:
        small, theirs = self.driver(optimizations="performance"), self.torch_driver()
        assert small.greedy(PROMPTS, 2) == theirs.greedy(PROMPTS, 2)


def refused(told: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=told):
        call()


def on_a_line(columns: int, fabric: str) -> dict[str, str]:
    sizes: dict[str, Any] = SIZES | {"intermediate_size": 32 * columns, "max_position_embeddings": 4096}
    if columns > 1:
        sizes |= {"num_attention_heads": 2 * columns, "num_key_value_heads": columns}
        sizes |= {"tie_word_embeddings": True, "rope_parameters": SCALED, "max_shard_size": "200KB"}
    ttnn.set_fabric_config(getattr(ttnn.FabricConfig, fabric))
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, columns), trace_region_size=10_000_000)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), **sizes, dtype=torch.bfloat16)
        told = outcomes(Checks, mesh, Path(folder))
    ttnn.close_mesh_device(mesh)
    return told
