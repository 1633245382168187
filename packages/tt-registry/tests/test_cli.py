import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tt_registry.cli import main

MakeBundle = Callable[..., Path]


def test_the_list_names_class_source_and_remarks(
    make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_bundle("good", {"adapter.py": ""}, "LlamaForCausalLM")
    bad = make_bundle("bad", {})
    assert main([], {"EXTRA_MODELS_DIR": str(good.parent)}) == 0
    lines = capsys.readouterr().out.splitlines()
    (llama,) = [line for line in lines if line.startswith("LlamaForCausalLM ")]
    assert llama.endswith(f"bundle {good}")
    assert "in place of the built-in models.tt_transformers" in lines[lines.index(llama) + 1]
    (mllama,) = [line for line in lines if line.startswith("Mllama")]
    assert "refused when served" in lines[lines.index(mllama) + 1]
    assert lines[-1].startswith(f"left out: bundle {bad}: main_class")


def test_the_list_as_json(make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    good = make_bundle("good", {"adapter.py": ""})
    bad = make_bundle("bad", {}, "OldForCausalLM")
    assert main(["--json"], {"EXTRA_MODELS_DIR": str(good.parent)}) == 0
    document = json.loads(capsys.readouterr().out)
    entries = {entry["registered_as"]: entry for entry in document["entries"]}
    assert entries["TTNewForCausalLM"]["source"] == {"kind": "bundle", "path": str(good)}
    assert entries["TTDeepseekV3ForCausalLM"]["whole_mesh"]["lanes"] == "as many lanes as chips"
    problem = next(p for p in document["problems"] if p["source"]["kind"] == "bundle")
    assert (problem["source"]["path"], problem["architectures"]) == (str(bad), ["OldForCausalLM"])


def test_a_wrong_setting_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"TT_LLAMA_TEXT_VER": "llama9"}) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: TT_LLAMA_TEXT_VER='llama9'")
    assert captured.out == ""


def test_check_of_a_folder_of_bundles(
    make_bundle: MakeBundle, fitting_adapter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_bundle("good", {"adapter.py": fitting_adapter})
    assert main(["check", str(good)], {}) == 0
    assert "fits the adapter contract" in capsys.readouterr().out
    bad = make_bundle("bad", {"adapter.py": "class Adapter: ..."})
    assert main(["check", str(good.parent)], {}) == 1
    out = capsys.readouterr().out
    assert "fits the adapter contract" in out
    assert f"{bad} (NewForCausalLM)\n  initialize_vllm_model: is missing" in out


def test_check_of_a_path_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent")], {}) == 1
    assert "1 finding\n" in capsys.readouterr().out


def test_it_runs_as_a_module(make_bundle: MakeBundle) -> None:
    folder = make_bundle("new", {"adapter.py": "import absent_module"})
    command = [sys.executable, "-m", "tt_registry", "check", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (1, "")
    assert "No module named 'absent_module'" in done.stdout
