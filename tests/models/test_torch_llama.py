"""The reference bundle against transformers: loading, prefill, decode, lanes and warm-up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaForCausalLM
from tt_registry.check import check_bundle

from .torch_llama_driver import BLOCK_SIZE, BUNDLE, VOCAB, Driver, make_checkpoint, reference

PROMPT = [(7 * i + 3) % VOCAB for i in range(11)]
OTHER = [(5 * i + 1) % VOCAB for i in range(14)]

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi head": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sharded": {"max_shard_size": "10KB"},
    "bfloat16": {"dtype": torch.bfloat16},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}},
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0, 1.2, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_checkpoint(folder)


def close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_llama_gives_the_logits_of_transformers(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    model = make_checkpoint(tmp_path, **variant)
    driver = Driver(tmp_path)
    logits = driver.prefill({0: (PROMPT, 0), 2: (OTHER, 0)})
    assert (logits.dtype, logits.shape[::2]) == (torch.float32, (2, VOCAB))
    close(logits[0, -1], reference(model, PROMPT))
    close(logits[1, -1], reference(model, OTHER))
    for step in range(6):
        one, two = PROMPT + [9] * step, OTHER + [4] * step
        logits = driver.decode({0: (9, len(one)), 2: (4, len(two))})
        assert logits.shape == (4, 1, VOCAB)
        close(logits[0, 0], reference(model, [*one, 9]))
        close(logits[2, 0], reference(model, [*two, 4]))


@pytest.mark.parametrize("cut", range(1, len(OTHER)))
def test_prefill_resumes_at_every_position(checkpoint: tuple[Path, LlamaForCausalLM], cut: int) -> None:
    folder, model = checkpoint
    driver = Driver(folder)
    close(driver.prefill({1: (OTHER[:cut], 0)})[0, -1], reference(model, OTHER[:cut]))
    close(driver.prefill({3: (PROMPT, 0), 1: (OTHER, cut)})[1, -1], reference(model, OTHER))


def test_a_prefix_hit_reads_the_blocks_of_another_request(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    folder, model = checkpoint
    driver = Driver(folder)
    driver.prefill({0: (OTHER, 0)})
    driver.page_table[1, :2] = driver.page_table[0, :2]
    branch = [*OTHER[: 2 * BLOCK_SIZE], 8, 8, 8]
    close(driver.prefill({1: (branch, 2 * BLOCK_SIZE)})[0, -1], reference(model, branch))
    close(driver.decode({0: (5, len(OTHER))})[0, 0], reference(model, [*OTHER, 5]))


def test_empty_rows_are_skipped_wherever_they_stand(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    folder, model = checkpoint
    driver = Driver(folder)
    driver.prefill({0: (PROMPT, 0), 1: (OTHER, 0), 3: (PROMPT, 0)})
    before = [(keys.clone(), values.clone()) for keys, values in driver.cache]
    logits = driver.decode({1: (5, len(OTHER))})
    close(logits[1, 0], reference(model, [*OTHER, 5]))
    assert logits[[0, 2, 3]].isnan().all()
    block, offset = driver.page_table[1, len(OTHER) // BLOCK_SIZE], len(OTHER) % BLOCK_SIZE
    for was, now in zip(before, driver.cache, strict=True):
        for old, new in zip(was, now, strict=True):
            changed = (old != new).any(dim=(1, 3)).nonzero().tolist()
            assert changed == [[block, offset]]
    assert driver.decode({}).isnan().all()


def test_a_row_does_not_depend_on_its_batch(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    folder, _ = checkpoint
    crowd, alone = Driver(folder), Driver(folder)
    crowd.prefill({0: (OTHER, 0), 1: (PROMPT, 0), 3: (OTHER[:5], 0)})
    alone.prefill({1: (PROMPT, 0)})
    inputs = {0: (1, len(OTHER)), 1: (2, len(PROMPT)), 3: (3, 5)}
    logits = crowd.decode(inputs)[1, 0]
    assert_close(logits, alone.decode({1: inputs[1]})[1, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_lanes_use_the_same_block_ids_without_meeting(
    checkpoint: tuple[Path, LlamaForCausalLM], lanes: int
) -> None:
    folder, model = checkpoint
    driver = Driver(folder, rows=8, lanes=lanes)
    prompts = {slot: [(slot + 3 * i) % VOCAB for i in range(5 + slot)] for slot in (6, 0, 2, 5)}
    logits = driver.prefill({slot: (tokens, 0) for slot, tokens in prompts.items()})
    for line, tokens in zip(logits, prompts.values(), strict=True):
        close(line[-1], reference(model, tokens))
    logits = driver.decode({slot: (7, len(tokens)) for slot, tokens in prompts.items()})
    for slot, tokens in prompts.items():
        close(logits[slot, 0], reference(model, [*tokens, 7]))


def test_it_works_in_inference_mode_and_out_of_it(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    folder, model = checkpoint
    with torch.inference_mode():
        driver = Driver(folder)
        driver.prefill({0: (OTHER, 0)})
    logits = driver.decode({0: (5, len(OTHER))})
    close(logits[0, 0], reference(model, [*OTHER, 5]))
    with torch.inference_mode():
        logits = driver.decode({0: (6, len(OTHER) + 1)})
    logits.add_(1.0)  # samplers write to what they get
    close(logits[0, 0] - 1.0, reference(model, [*OTHER, 5, 6]))


def test_performance_means_bfloat16_and_is_near(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    folder, model = checkpoint
    driver = Driver(folder, optimizations="performance")
    logits = driver.prefill({0: (PROMPT, 0)})[0, -1]
    assert driver.cache[0][0].dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    wanted = reference(model, PROMPT)
    assert 0 < (logits - wanted).norm() / wanted.norm() < 0.1


def test_warm_up_leaves_requests_and_the_device_as_they_were(
    checkpoint: tuple[Path, LlamaForCausalLM],
) -> None:
    folder, _ = checkpoint
    driver = Driver(folder)
    driver.prefill({0: (PROMPT, 0)})
    driver.decode({0: (9, len(PROMPT))})
    kept = [keys[1:].clone() for keys, _ in driver.cache]
    for trace in (False, True):
        driver.adapter.already_warmed_up_prefill = False
        driver.adapter.warmup_model_prefill(
            kv_cache=driver.cache, enable_trace=trace, can_sample_on_device=True
        )
        driver.adapter.warmup_model_decode(
            kv_cache=driver.cache,
            max_batch_size=4,
            num_blocks=8,
            can_sample_on_device=True,
            enable_trace=trace,
        )
    assert driver.adapter.already_warmed_up_prefill
    assert all(torch.equal(was, now[1:]) for was, (now, _) in zip(kept, driver.cache, strict=True))
    assert driver.cache[0][0][0].any()  # it did run
    assert driver.decode({}, commands="").isnan().any(-1)[:, 0].tolist() == [False, True, True, True]


def test_the_bundle_fits_the_contract() -> None:
    assert check_bundle(BUNDLE).findings == ()


def test_a_pool_is_never_smaller_than_one_request() -> None:
    from .torch_llama_driver import adapter_class

    def pool(length: int, rows: int) -> int:
        tokens: int = adapter_class().get_max_tokens_all_users(
            model_name="m", num_devices=32, tt_data_parallel=4, max_model_len=length, max_num_seqs=rows
        )
        return tokens

    assert (pool(1000, 8), pool(4096, 32), pool(131_072, 8)) == (8000, 32_768, 131_072)


def test_a_missing_tensor_is_named_with_its_place(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    lost = "model.layers.1.mlp.up_proj.weight"
    file = tmp_path / listed["weight_map"][lost]
    held = [name for name, shard in listed["weight_map"].items() if shard == file.name]
    listed["weight_map"] = {name: shard for name, shard in listed["weight_map"].items() if name not in held}
    index.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=rf"{index.name} lacks .*{lost}"):
        Driver(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} does not exist"):
        Driver(tmp_path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 40', '"intermediate_size": 48'))
    message = r"model.safetensors: model.layers.0.mlp.\w+_proj.weight has the shape .*40.*48"
    with pytest.raises(ValueError, match=message):
        Driver(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        (
            {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
                "max_position_embeddings": 16,
            },
            "'dynamic' RoPE needs max_model_len <= 16 here, and it is 32",
        ),
    ],
)
def test_what_the_network_cannot_do_is_refused(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    make_checkpoint(tmp_path, **overrides)
    with pytest.raises(ValueError, match=message):
        Driver(tmp_path)


def test_an_unknown_optimization_is_refused(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ValueError, match="optimizations is 'fast'; use 'performance', 'accuracy' or None"):
        Driver(checkpoint[0], optimizations="fast")
