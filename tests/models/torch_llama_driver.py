"""Tiny Llama checkpoints, and a driver that keeps the books of a runner: rows, blocks and page tables."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from tt_registry.bundles import read_bundle
from tt_registry.importing import BundleFinder

BUNDLE = Path(__file__).parents[2] / "examples/models/torch-llama"
VOCAB = 61
BLOCK_SIZE = 4
WIDTH = 8  # blocks of a row
LANE_BLOCKS = 72


def adapter_class() -> Any:
    BundleFinder([BUNDLE]).install()
    return read_bundle(BUNDLE).entries[0].load()


def make_checkpoint(folder: Path, **overrides: Any) -> LlamaForCausalLM:
    """Write a random Llama to `folder`, and return it in float32 as transformers reads it back."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    shard_size = overrides.pop("max_shard_size", "1GB")
    dtype = overrides.pop("dtype", torch.float32)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings | overrides))  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    read: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return read


@torch.no_grad()
def reference(model: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    """transformers' logits [V] after the last of `tokens`."""
    logits: Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return logits


class Driver:
    """An adapter with its cache, called as a runner calls it; every row owns the blocks of its page table."""

    def __init__(self, folder: Path, rows: int = 4, lanes: int = 1, **settings: Any) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.adapter = adapter_class().initialize_vllm_model(
            hf_config=config,
            mesh_device=None,
            max_batch_size=rows,
            max_seq_len=BLOCK_SIZE * WIDTH,
            tt_data_parallel=lanes,
            **{"optimizations": None} | settings,
        )
        self.lanes, self.rows = lanes, rows
        # What the contract says for many devices: one head on each, whatever the model has.
        shape = (LANE_BLOCKS, 1, BLOCK_SIZE, config.head_dim)
        self.cache = self.adapter.allocate_kv_cache(
            shape=shape, dtype=torch.bfloat16, num_layers=config.num_hidden_layers
        )
        self.page_table = torch.zeros(rows, WIDTH, dtype=torch.int32)
        for row in range(rows):
            first = 1 + (row % (rows // lanes)) * WIDTH  # lanes use the same block ids
            self.page_table[row] = torch.arange(first, first + WIDTH)

    def prefill(self, chunks: dict[int, tuple[list[int], int]], **extra: Any) -> Any:
        """`chunks`: row -> (known tokens up to the end of the chunk, start of the chunk)."""
        ends = [len(tokens) for tokens, _ in chunks.values()]
        padded = torch.zeros(len(chunks), max(ends), dtype=torch.int32)
        for line, (tokens, _) in zip(padded, chunks.values(), strict=True):
            line[: len(tokens)] = torch.tensor(tokens)
        return self.adapter.prefill_forward(
            tokens=padded,
            page_table=self.page_table[list(chunks)],
            kv_cache=self.cache,
            enable_trace=False,
            prompt_lens=torch.tensor(ends).numpy(),
            start_pos=torch.tensor([start for _, start in chunks.values()], dtype=torch.int32).numpy(),
            empty_slots=list(chunks),
            **extra,
        )

    def decode(self, inputs: dict[int, tuple[int, int]], commands: str = "inputs", **extra: Any) -> Any:
        """`inputs`: row -> (token, position). `commands`: some of "inputs table params state", by space."""
        tokens = torch.zeros(self.rows, 1, dtype=torch.int32)
        positions = torch.full((self.rows,), -1, dtype=torch.int32)
        for row, (token, position) in inputs.items():
            tokens[row], positions[row] = token, position
        given = commands.split()
        call = {
            "tokens": tokens,
            "start_pos": positions,
            "page_table": self.page_table,
            "kv_cache": self.cache,
            "enable_trace": False,
            "read_from_device": True,
            "reload_inputs": "inputs" in given,
            "reload_page_table": "table" in given,
            "reload_sampling_params": "params" in given,
            "reset_sampling_state": "state" in given,
        }
        return self.adapter.decode_forward(**call | extra)
