"""What benchmarks that run an engine have in common: a model folder, requests, and the environment."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

REQUESTS, TOKENS_IN = 32, 128


def write_model(folder: Path, vocab: int) -> Path:
    """A model directory with a configuration alone."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts(vocab: int) -> Iterator[list[int]]:
    """Token ids of 32 prompts that begin differently."""
    for index in range(REQUESTS):
        yield [(index * 131 + position) % (vocab - 1) + 1 for position in range(TOKENS_IN)]


def set_environment(bundles: Path) -> None:
    """An engine in this process, on a host mesh, with the models of ``bundles``."""
    os.environ |= {
        "MESH_DEVICE": "host:8x4",
        "EXTRA_MODELS_DIR": str(bundles),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
