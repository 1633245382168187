"""A model directory small enough for tests that need many requests rather than sense."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_tiny(folder: Path, smollm2: Path) -> Path:
    """Write a random Llama of two small layers, with the tokenizer of SmolLM2, and return `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1_024,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    for name in TOKENIZER_FILES:
        if (smollm2 / name).is_file():
            (folder / name).write_bytes((smollm2 / name).read_bytes())
    return folder
