"""Real engines in this process, kept while tests of the same configuration follow each other.

vLLM reads its environment when an engine is built, and keeps what it read. Each engine is therefore built
under the environment that it needs, and the process gets its own back at once.
"""

import gc
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prepare_smollm2 import prepare
from transformers import LlamaConfig
from tt_registry import Registry
from vllm import LLM, EngineArgs, ModelRegistry, envs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm_tt_plugin import entrypoints

from ..tiny_model import write_tiny
from .watch import PlanWatch

HERE = Path(__file__).parent
KEPT_ENGINES = 5
ORACLE = Path(__file__).resolve().parents[2] / "examples/models/oracle"
ORACLES = ("Oracle", "UndeclaredOracle", "OracleVersion0")
ORACLE_VOCAB = 61
ORACLE_LAYERS = 1

Engines = Callable[..., LLM]
REFUSALS = (ValueError, VLLMValidationError)
"""What vLLM answers with HTTP 400."""


class LaneEngine(LLM):
    """`LLM` without its constructor, which refuses data parallelism before it can become lanes."""

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        arguments = EngineArgs(model=str(model), disable_log_stats=True, **settings)
        self.llm_engine = LLMEngine.from_engine_args(arguments)


class EngineShelf:
    """Builds engines, and keeps the few that were used last."""

    def __init__(self, bundles: Path, inspected: Sequence[str] = ()) -> None:
        self._bundles = bundles
        self._inspected = inspected
        self._kept: OrderedDict[str, LLM] = OrderedDict()

    def __call__(self, model: Path, v2_wire_form: bool = False, **settings: Any) -> LLM:
        """The engine of these settings of vLLM's `LLM`, at rest and with an empty prefix cache."""
        key = json.dumps([str(model), v2_wire_form, settings], sort_keys=True, default=repr)
        if key in self._kept and self._kept[key].llm_engine.has_unfinished_requests():
            self._close(key)  # a test failed half way
        if key not in self._kept:
            self._kept[key] = self._build(model, v2_wire_form, settings)
            while len(self._kept) > KEPT_ENGINES:
                self._close(next(iter(self._kept)))
        self._kept.move_to_end(key)
        engine = self._kept[key]
        engine.reset_prefix_cache()
        return engine

    def _build(self, model: Path, v2_wire_form: bool, settings: dict[str, Any]) -> LLM:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MESH_DEVICE", "host:8x4" if "data_parallel_size" in settings else "host")
            patch.setenv("EXTRA_MODELS_DIR", str(self._bundles))
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2_wire_form)))
            envs.disable_envs_cache()
            entrypoints.register()
            inspect_here(self._bundles, self._inspected)
            try:
                return (
                    LaneEngine(model, settings)
                    if "data_parallel_size" in settings
                    else LLM(str(model), **settings)
                )
            finally:
                envs.disable_envs_cache()

    def _close(self, key: str) -> None:
        self._kept.pop(key).llm_engine.engine_core.shutdown()
        gc.collect()  # an engine is full of cycles, and of weights

    def close(self) -> None:
        for engine in self._kept.values():
            engine.llm_engine.engine_core.shutdown()


def inspect_here(bundles: Path, names: Sequence[str]) -> None:
    """Give vLLM the oracles as classes. By name, it would start a process for each one to look at it."""
    registry = Registry.from_environ({"EXTRA_MODELS_DIR": str(bundles)})
    for name in names:
        architecture = f"{name}ForCausalLM"
        ModelRegistry.register_model(architecture, registry.resolve(architecture).load())


@pytest.fixture(scope="session", autouse=True)
def frozen_imports() -> Iterator[None]:
    """Whatever was imported stays out of sight of the garbage collector, and engines within it.

    vLLM freezes all objects when an engine is built, thaws them when it ends, and collects at both: to look
    through the objects of all modules each time takes longer than most tests.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for EXTRA_MODELS_DIR: the reference bundle, and one for each oracle."""
    folder = tmp_path_factory.mktemp("bundles")
    (folder / "torch-llama").symlink_to(HERE.parents[1] / "examples/models/torch-llama")
    for name in ORACLES:
        (folder / name).mkdir()
        for module in ORACLE.glob("*.py"):
            (folder / name / module.name).symlink_to(module)
        metadata = {"arch": f"{name}ForCausalLM", "main_class": f"oracle_adapter:{name}"}
        (folder / name / "vllm_metadata.json").write_text(json.dumps(metadata))
    return folder


@pytest.fixture(scope="session")
def shelf(bundles: Path) -> Iterator[EngineShelf]:
    shelf = EngineShelf(bundles, ORACLES)
    yield shelf
    shelf.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct."""
    return prepare()


@pytest.fixture(scope="session")
def smollm2_engine(shelf: EngineShelf, smollm2: Path) -> Engines:
    def build(**settings: Any) -> LLM:
        return shelf(smollm2, **{"max_model_len": 512, "max_num_seqs": 8} | settings)

    return build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A random Llama of two small layers, with the tokenizer of SmolLM2."""
    return write_tiny(tmp_path_factory.mktemp("tiny"), smollm2)


@pytest.fixture(scope="session")
def tiny_engine(shelf: EngineShelf, tiny: Path) -> Engines:
    def build(**settings: Any) -> LLM:
        return shelf(tiny, **{"max_model_len": 256, "max_num_seqs": 8} | settings)

    return build


@pytest.fixture(scope="session")
def oracle_engine(shelf: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Builds engines of an oracle, without a tokenizer."""
    folders: dict[str, Path] = {}

    def folder_of(oracle: str) -> Path:
        if oracle not in folders:
            folders[oracle] = tmp_path_factory.mktemp(oracle)
            config = LlamaConfig(
                architectures=[f"{oracle}ForCausalLM"],
                vocab_size=ORACLE_VOCAB,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=ORACLE_LAYERS,
                num_attention_heads=1,
                num_key_value_heads=1,
                max_position_embeddings=256,
                eos_token_id=None,
                bos_token_id=None,
            )
            config.save_pretrained(folders[oracle])
        return folders[oracle]

    def build(oracle: str = "Oracle", **settings: Any) -> LLM:
        plain = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 4, "skip_tokenizer_init": True}
        return shelf(folder_of(oracle), **plain | settings)

    return build


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], PlanWatch]:
    """Looks at every step plan of an engine until the test ends."""

    def start(engine: LLM) -> PlanWatch:
        watching = PlanWatch()
        scheduler = core_of(engine).scheduler
        schedule = scheduler.schedule

        def watched(*args: Any) -> Any:
            plan = schedule(*args)
            watching.see(plan)
            return plan

        monkeypatch.setattr(scheduler, "schedule", watched)
        return watching

    return start


def core_of(engine: LLM) -> Any:
    """vLLM's engine core, which an engine in this process holds behind its client."""
    client: Any = engine.llm_engine.engine_core
    return client.engine_core


def lanes_of(engine: LLM) -> list[Any]:
    """The schedulers of an engine's lanes: its own where it has one."""
    scheduler = core_of(engine).scheduler
    return getattr(scheduler, "lanes", [scheduler])
