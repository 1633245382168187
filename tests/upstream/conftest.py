"""A checkpoint that is only a configuration, a bundle for it, and vLLM's configuration of the two."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import vllm_parts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

MakeConfig = Callable[..., "VllmConfig"]
MakeScheduler = Callable[..., "Scheduler"]


@pytest.fixture(scope="session")
def checkpoint_and_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return vllm_parts.write_checkpoint_and_bundle(tmp_path_factory.mktemp("upstream"))


@pytest.fixture
def make_config(checkpoint_and_bundle: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    checkpoint, bundle = checkpoint_and_bundle
    monkeypatch.setenv("MESH_DEVICE", "host")
    monkeypatch.setenv("EXTRA_MODELS_DIR", str(bundle))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    return lambda **options: vllm_parts.make_config(checkpoint, **options)


@pytest.fixture
def make_scheduler(make_config: MakeConfig) -> MakeScheduler:
    def make(blocks: int = 100, **options: Any) -> "Scheduler":
        scheduler: Scheduler = vllm_parts.make_scheduler(make_config(**options), blocks)
        return scheduler

    return make
