"""Where the doctor gets its facts, and one run of the whole command."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_tt_plugin.doctor.children import bundle_findings, platforms_given
from vllm_tt_plugin.doctor.machine import driver_files, holders, memory_available
from vllm_tt_plugin.doctor.sources import is_on_path, registered, unmet

from .conftest import ARCHITECTURE, write_bundle


def doctor(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "vllm_tt_plugin", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a command that serves users' models without devices."""
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MESH_DEVICE", "host:1x2")
    monkeypatch.setenv("TT_VLLM_BUILTIN_MODELS", "0")
    return monkeypatch


def test_the_command(on_host: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_bundle(tmp_path, "HostSampled", on_host)
    ended = doctor("--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    assert told["serves"] is True
    assert [model["architecture"] for model in told["facts"]["models"]] == [ARCHITECTURE]
    assert told["facts"]["versions"]["vllm"] == importlib.metadata.version("vllm")
    assert any("a host mesh of 1x2" in finding["found"] for finding in told["findings"])


def test_the_command_where_nothing_would_be_served(on_host: pytest.MonkeyPatch) -> None:
    on_host.setenv("MESH_DEVICE", "N151")
    ended = doctor("--additional-config", '{"tt": {"trace_mod": "all"}}')
    assert ended.returncode == 1
    assert ended.stdout.startswith("A server would not start here: 3 problems")
    for words in ("MESH_DEVICE is 'N151'", "Did you mean 'trace_mode'?", "no architecture is registered"):
        assert words in ended.stdout


def test_neither_vllm_nor_torch_is_imported() -> None:
    code = (
        "import sys, vllm_tt_plugin.cli as cli; cli.gather({'MESH_DEVICE': 'host'});"
        "sys.exit(' '.join({'vllm', 'torch', 'ttnn'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bundle_that_fails_is_told_without_being_imported_here(tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text("print('noise')\nimport nowhere_to_be_found\n")
    (tmp_path / "vllm_metadata.json").write_text('{"arch": "MineForCausalLM", "main_class": "adapter:Mine"}')
    environ = {"EXTRA_MODELS_DIR": str(tmp_path), "TT_VLLM_BUILTIN_MODELS": "0"}
    models, problems, bundles = registered(environ)
    assert ([model.found for model in models], problems, bundles) == ([True], (), [str(tmp_path)])
    (finding,) = bundle_findings(bundles)
    assert str(tmp_path) in finding
    assert "nowhere_to_be_found" in finding
    (tmp_path / "adapter.py").write_text("import os; os._exit(3)")
    assert "ended with 3" in bundle_findings(bundles)[0]


def test_what_the_registry_refuses_is_a_problem(tmp_path: Path) -> None:
    for environ in ({"TT_VLLM_BUILTIN_MODELS": "yes"}, {"EXTRA_MODELS_DIR": str(tmp_path)}):
        _, (problem,), _ = registered(environ)
        assert next(iter(environ)) in problem


def test_platform_plugins_are_asked() -> None:
    assert platforms_given([]) == {}
    assert platforms_given(["tt", "no-such-plugin"]) == {"tt": "vllm_tt_plugin.platform.TTPlatform"}


def test_requirements_that_are_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(unmet("tt-vllm-plugin")) == []
    assert list(unmet("no-such-distribution")) == []
    wanted = ["attrs<2", "no-such-distribution>=1", "attrs>=20", "numpy<1; extra == 'old'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    attrs_wanted, other = unmet("tt-vllm-plugin")
    assert attrs_wanted.startswith("tt-vllm-plugin wants attrs<2, and attrs ")
    assert other == "tt-vllm-plugin wants no-such-distribution>=1, and it is not installed"


def test_modules_on_the_path_are_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tt_doctor_models" / "demos"
    package.mkdir(parents=True)
    (package / "adapter.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_on_path("tt_doctor_models.demos.adapter")
    assert not is_on_path("tt_doctor_models.demos.other")
    assert not is_on_path("tt_doctor_nowhere.adapter")
    assert "tt_doctor_models" not in sys.modules


def test_who_has_a_card_open(tmp_path: Path) -> None:
    for name in ("10", "2", "by-id"):
        (tmp_path / name).touch()
    assert driver_files(tmp_path) == ("2", "10")
    assert list(holders(tmp_path)) == []
    with (tmp_path / "2").open():
        (holder,) = holders(tmp_path)
    assert holder.pid == os.getpid()
    assert holder.command


def test_free_memory_is_what_a_container_has_left(tmp_path: Path) -> None:
    assert memory_available() > 0
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8 kB\n")
    assert memory_available(tmp_path) == 8192
    (group / "memory.current").write_text("3000\n")
    (group / "memory.max").write_text("max\n")
    assert memory_available(tmp_path) == 8192
    (group / "memory.max").write_text("5000\n")
    assert memory_available(tmp_path) == 2000
