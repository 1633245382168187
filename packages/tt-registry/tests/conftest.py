import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MakeBundle = Callable[..., Path]

FITTING_ADAPTER = """
class Adapter:
    model_capabilities = {"supports_sample_on_device": True}

    def __init__(self, *, vllm_config): ...
    def embed_input_ids(self, input_ids): ...
    def forward(self, input_ids, positions): ...
    def compute_logits(self, hidden_states): ...

    @classmethod
    def initialize_vllm_model(
        cls, *, hf_config, mesh_device, max_batch_size, max_seq_len, tt_data_parallel, optimizations
    ): ...
    def allocate_kv_cache(self, *, shape, dtype, num_layers): ...
    def warmup_model_prefill(self, *, kv_cache, enable_trace, can_sample_on_device): ...
    def warmup_model_decode(
        self, *, kv_cache, max_batch_size, num_blocks, can_sample_on_device, enable_trace
    ): ...
    def prefill_forward(
        self, *, tokens, page_table, kv_cache, enable_trace, prompt_lens, start_pos, empty_slots,
        sampling_params=None,
    ): ...
    def decode_forward(
        self, *, tokens, page_table, kv_cache, start_pos, enable_trace, read_from_device,
        sampling_params=None, prompt_tokens=None, output_tokens=None, reset_batch=False,
    ): ...
    def read_decode_output(self, out, *, async_read): ...
    def process_decode_output_host(self, handles, *, is_tokens): ...
"""


@pytest.fixture
def fitting_adapter() -> str:
    """Source of a class that fits the contract with keyword-only signatures."""
    return FITTING_ADAPTER


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    """Writes a bundle folder: `make_bundle("a", {"adapter.py": "..."}, arch="XForCausalLM")`."""

    def make(
        name: str,
        files: dict[str, str],
        arch: object = "NewForCausalLM",
        main_class: object = "adapter:Adapter",
    ) -> Path:
        folder = tmp_path / "bundles" / name
        metadata = json.dumps({"arch": arch, "main_class": main_class})
        for file, text in {"vllm_metadata.json": metadata, **files}.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return make


@pytest.fixture(autouse=True)
def _same_imports_afterwards() -> Iterator[None]:
    meta_path, path, modules = list(sys.meta_path), list(sys.path), set(sys.modules)
    yield
    sys.meta_path[:], sys.path[:] = meta_path, path
    for name in set(sys.modules) - modules:
        if name.startswith("tt_bundles"):
            del sys.modules[name]
