"""The stand-in for the compiler, and the folder of links that has it. A folder plays the part of ttnn."""

import os
import subprocess
from pathlib import Path

import pytest
from tt_mock.overlay import COMPILER, compiler_version, link_root

ASSEMBLER = """#!/bin/bash
while (($#)); do [[ $1 == -o ]] && output=$2; shift; done
cat >"$output"
"""


def lines_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """As a ttnn that comes with a real compiler."""
    folder = tmp_path / "installed"
    for name in ("tt_metal/api", "runtime/hw", f"runtime/sfpi/compiler/bin/{COMPILER}", "ttnn"):
        (folder / name).mkdir(parents=True)
    (folder / "tt_metal/sfpi-version").write_text("sfpi_version='7.89.0'\nsfpi_build='1050'\n")
    return folder


@pytest.fixture
def root(installed: Path, tmp_path: Path) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "riscv64-unknown-elf-as").write_text(ASSEMBLER)
    (tools / "riscv64-unknown-elf-as").chmod(0o755)
    before = lines_of(installed)
    link_root(tmp_path / "root", installed, tools)
    assert lines_of(installed) == before, "the installed ttnn was changed"
    return tmp_path / "root"


def compiled(root: Path, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [str(root / "runtime/sfpi/compiler/bin" / COMPILER), *arguments]
    clean = {name: os.environ[name] for name in ("PATH",)}
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, check=False)


def test_all_but_the_compiler_is_linked(root: Path, installed: Path) -> None:
    links = {path.relative_to(root): path.readlink() for path in root.rglob("*") if path.is_symlink()}
    assert links == {Path(name): installed / name for name in ("tt_metal", "ttnn", "runtime/hw")}
    assert not (root / "runtime/sfpi").is_symlink()


def test_a_device_that_is_no_mock_gets_no_kernel(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "kernel.o"
    ended = compiled(root, "-o", str(output), "kernel.cc")
    assert ended.returncode == 1
    assert "for mock clusters only" in ended.stderr
    assert not output.exists()


def test_every_kernel_is_the_stub(root: Path, tmp_path: Path) -> None:
    output, depends = tmp_path / "kernel.o", tmp_path / "kernel.d"
    mock = {"TT_METAL_MOCK_CLUSTER_DESC_PATH": "described.yaml"}
    ended = compiled(root, "-MF", str(depends), "-include", "a.h", "-o", str(output), "kernel.cc", **mock)
    assert ended.returncode == 0, ended.stderr
    assert output.read_bytes() == (root / "runtime/sfpi/compiler/bin/stub.o").read_bytes()
    assert depends.read_text() == f"{output}: kernel.cc\n"


def test_it_answers_with_the_version_that_ttnn_expects(root: Path, installed: Path) -> None:
    version = compiler_version(installed)
    assert version == "7.89.0[1050]"
    assert f"tenstorrent/sfpi:{version}" in compiled(root, "--version", STAND_IN_VERSION=version).stdout
