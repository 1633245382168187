"""Serves the ttnn Llama through the engine; the environment has MESH_DEVICE and EXTRA_MODELS_DIR."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tt_mock import Traced
from tt_mock.ttnn_shadows import Shadows
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_tt_plugin import entrypoints

from tests.models.torch_llama_driver import make_checkpoint

from .ttnn_llama_checks import CAPACITY, ROWS, SIZES, Driver, loaded, prompt, stand_in

LENGTHS = (40, 3, 129, 70, 31)
"""More prompts than rows; the longest takes several chunks."""
TOKENS = 12


def served() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return served_from(Path(folder))


def served_from(folder: Path) -> dict[str, Any]:
    make_checkpoint(folder, **SIZES, max_position_embeddings=CAPACITY, dtype=torch.bfloat16)
    entrypoints.register()
    shadows = Traced(Shadows(SimpleNamespace(shape=(1, 1))))
    stand_in(shadows)
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=CAPACITY,
        block_size=64,
        max_num_seqs=ROWS,
        max_num_batched_tokens=100,
        additional_config={"tt": {"sample_on_device_mode": "all"}},
    )

    def generated(**asked: Any) -> dict[str, Any]:
        params = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, **asked
        )
        prompts = [TokensPrompt(prompt_token_ids=prompt(length)) for length in LENGTHS]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        executed, shadows.executed = shadows.executed, []
        return {
            "texts": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": sum(output.num_cached_tokens or 0 for output in outputs),
            "executed": executed,
        }

    torch_bundle = Driver(loaded("torch-llama", folder, None), 1)
    return {
        "expected": [torch_bundle.greedy({0: prompt(length)}, TOKENS)[0][length:] for length in LENGTHS],
        "on device": generated(),
        "on host": generated(logprobs=1),  # the device returns none
        "traces": len(shadows.traces),
        "compiled": shadows.mesh.num_program_cache_entries() - shadows.programs,
    }
