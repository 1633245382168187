"""What cannot be served is refused on the command line, before anything starts.

The member's own tests go through every setting. Here are the whole command, and the states of an installation
that a running process cannot take on.
"""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_tt_plugin import entrypoints, mesh_ttnn
from vllm_tt_plugin.errors import ConfigurationError

from .serving import VLLM_SERVE, environment

LIMIT_S = 240
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


def checkpoint(folder: Path, **changes: Any) -> str:
    """A model directory that holds a configuration alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return str(folder)


def run(command: list[str], **changes: str | None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def refused(model: str, *arguments: str, **changes: str | None) -> str:
    """What `vllm serve` prints before it ends without having served."""
    ended = run([*VLLM_SERVE, model, "--skip-tokenizer-init", *arguments], **changes)
    assert ended.returncode not in (0, None), ended.stdout
    assert "Traceback" in ended.stdout or "error" in ended.stdout.lower()
    return ended.stdout


def test_one_message_lists_all_that_is_wrong_with_its_fix(tmp_path: Path) -> None:
    said = refused(
        checkpoint(tmp_path / "model"),
        *("--tensor-parallel-size", "2"),
        "--enable-lora",
        *("--additional-config.tt.sample_on_device_mod", "all"),
        *("--additional-config.tt.trace_mode", "sometimes"),
        MESH_DEVICE="N151",
    )
    start = said.rindex("The Tenstorrent plugin cannot serve this configuration:")
    numbered = [line.strip() for line in said[start:].splitlines()[1:] if line.strip()[:1].isdigit()]
    expected = [
        ("sample_on_device_mod'", "Did you mean 'sample_on_device_mode'?"),
        ("trace_mode is 'sometimes'", "'all', 'decode_only', 'none'"),
        ("MESH_DEVICE is 'N151'", "N150"),
        ("--tensor-parallel-size is 2", "Leave it at 1"),
        ("LoRA", "Remove --enable-lora"),
    ]
    assert len(numbered) == len(expected), said[start:]
    for line, (found, fix) in zip(numbered, expected, strict=True):
        assert found in line
        assert fix in line


def test_a_bundle_that_does_not_import_is_named_with_its_failure(tmp_path: Path) -> None:
    """Of an architecture that vLLM does not know, so that vLLM itself looks into the bundle first."""
    bundle = tmp_path / "bundles" / "broken-bundle"
    bundle.mkdir(parents=True)
    (bundle / "adapter.py").write_text("import nowhere_to_be_found\n")
    metadata = {"arch": "BrokenForCausalLM", "main_class": "adapter:BrokenForCausalLM"}
    (bundle / "vllm_metadata.json").write_text(json.dumps(metadata))
    said = refused(
        checkpoint(tmp_path / "model", architectures=["BrokenForCausalLM"]),
        EXTRA_MODELS_DIR=str(bundle.parent),
    )
    assert "nowhere_to_be_found" in said
    assert "broken-bundle" in said


def test_without_ttnn_the_plugin_stays_out_of_the_way() -> None:
    """Asked in an interpreter that sees the plugin's sources and no installed package."""
    source = Path(entrypoints.__file__).parents[1]
    asks = f"import sys; sys.path.insert(0, {str(source)!r}); from vllm_tt_plugin import entrypoints as e; "
    alone = [sys.executable, "-S", "-c", asks + "e.register(); print('says', e.platform_plugin())"]
    assert run(alone, MESH_DEVICE=None).stdout == "says None\n"
    asked_for = [sys.executable, "-S", "-c", asks + "print('says', e.platform_plugin())"]
    assert run(asked_for).stdout == "says vllm_tt_plugin.platform.TTPlatform\n"


def test_a_broken_ttnn_is_said_loudly_and_no_other_platform_serves(tmp_path: Path) -> None:
    package = tmp_path / "path" / "ttnn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libtt_metal.so: cannot open')\n")
    said = refused(checkpoint(tmp_path / "model"), PYTHONPATH=str(package.parent), MESH_DEVICE=None)
    assert "ttnn is installed but cannot be used" in said
    assert "libtt_metal.so: cannot open" in said
    assert "MESH_DEVICE=host" in said


@pytest.mark.skipif(Path("/dev/tenstorrent").exists(), reason="this machine has chips")
def test_a_machine_without_chips_is_told_from_a_broken_installation() -> None:
    probe = mesh_ttnn.probe()
    assert (probe.chips, probe.failure, probe.cluster) == (0, None, "")
    assert "FABRIC_1D" in probe.fabric_names


@pytest.mark.parametrize("installed", ["0.32.4", "0.34.0rc1", "1.0", "0.330.0"])
def test_another_version_of_vllm_is_refused_at_load(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setenv("MESH_DEVICE", "host")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: installed)
    with pytest.raises(ConfigurationError, match=rf"vLLM {installed} .* 0\.33\.x") as caught:
        entrypoints.register()
    assert "Install vLLM 0.33.x" in str(caught.value)
