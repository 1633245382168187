"""One bundle, and real `VllmConfig`s made by vLLM's own argument parsing. No engine is started."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM asks for its platform as soon as it is imported, and ttnn need not be installed here.
os.environ.setdefault("MESH_DEVICE", "host")

ARCHITECTURE = "HashForCausalLM"
MakeConfig = Callable[..., "VllmConfig"]

CHECKPOINT = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(CHECKPOINT))
    return folder


def write_bundle(folder: Path, class_name: str, patch: pytest.MonkeyPatch) -> None:
    """Make a class of `strict_adapters` serve the checkpoint, as a user would: by a bundle."""
    source = Path(__file__).with_name("strict_adapters.py").read_text()
    (folder / "adapter.py").write_text(source)
    metadata = {"arch": ARCHITECTURE, "main_class": f"adapter:{class_name}"}
    (folder / "vllm_metadata.json").write_text(json.dumps(metadata))
    patch.setenv("EXTRA_MODELS_DIR", str(folder))


def configure(checkpoint: Path, **options: Any) -> "VllmConfig":
    import torch
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    from .strict_adapters import Language

    options = {"max_num_seqs": 8, "block_size": 4, **options}
    arguments = EngineArgs(model=str(checkpoint), skip_tokenizer_init=True, **options)
    # The class itself, where the plugin registers a path: for those vLLM starts a process to look inside.
    ModelRegistry.register_model(ARCHITECTURE, type("Hash", (Language, torch.nn.Module), {}))
    return arguments.create_engine_config()


def with_lanes(config: "VllmConfig", lanes: int) -> "VllmConfig":
    """The configuration that `--data-parallel-size` gives for a model that runs the whole mesh."""
    from vllm_tt_plugin.lanes import fold_data_parallel

    config.parallel_config.data_parallel_size = lanes
    fold_data_parallel(config)
    return config


@pytest.fixture
def serve_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`serve_bundle("Version1")`: from now on, that class serves the checkpoint."""
    return lambda class_name: write_bundle(tmp_path, class_name, monkeypatch)


@pytest.fixture
def make_config(checkpoint: Path, serve_bundle: Callable[[str], None]) -> MakeConfig:
    """`make_config(max_num_seqs=4)` is what `vllm serve --max-num-seqs 4` would start with."""
    serve_bundle("HostSampled")
    return lambda **options: configure(checkpoint, **options)


@pytest.fixture(scope="module")
def vllm_config(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> "VllmConfig":
    """One plain configuration, to be read and not changed."""
    with pytest.MonkeyPatch.context() as patch:
        write_bundle(tmp_path_factory.mktemp("bundle"), "HostSampled", patch)
        return configure(checkpoint)


@pytest.fixture
def plugin_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What the plugin logs. vLLM's loggers pass nothing on to the root, once vLLM has set them up."""
    logger = logging.getLogger("vllm.tt_plugin")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)
