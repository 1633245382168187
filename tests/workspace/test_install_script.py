"""The script that adds vLLM and the plugin to an environment of TT-Metal, as far as it changes none."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

from wheels import ROOT, members

ORDER = ["tt-registry", "tt-scheduler", "tt-sampling", "elastic-ep", "tt-vllm-plugin"]
SCRIPT = ROOT / "tools" / "install_on_tt_metal.sh"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """As where uv is on PATH: an environment may come without pip."""
    env = os.environ | {"PATH": f"{ROOT / '.tools' / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_dry_run_says_every_step_and_takes_none() -> None:
    before = sorted(str(found.metadata["Name"]) for found in importlib.metadata.distributions())
    ended = run("--dry-run", sys.executable)
    assert ended.returncode == 0, ended.stderr
    steps = [line for line in ended.stdout.splitlines() if line.startswith("+ ")]
    assert all("--constraint" in step for step in steps)
    vllm, members_step = steps[1], steps[-1]
    assert "VLLM_TARGET_DEVICE=empty" in vllm
    assert f"--no-deps --no-binary vllm vllm=={importlib.metadata.version('vllm')}" in vllm
    assert members_step.split("./packages/")[1:] == [f"{name} " for name in ORDER[:-1]] + [ORDER[-1]]
    for name in ("torch", "numpy", "ttnn"):
        assert f"{name}=={importlib.metadata.version(name)}" in ended.stderr
    assert before == sorted(str(found.metadata["Name"]) for found in importlib.metadata.distributions())


def test_every_member_that_serves_is_installed() -> None:
    assert sorted([*ORDER, "tt-mock"]) == sorted(members())


def test_an_environment_that_tt_metal_did_not_make_is_refused(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    ended = run("--dry-run", str(tmp_path / "bare" / "bin" / "python"))
    assert ended.returncode == 1
    assert "has no torch" in ended.stderr
    assert ended.stdout == ""
    assert "no nowhere/python" in run("nowhere/python").stderr
