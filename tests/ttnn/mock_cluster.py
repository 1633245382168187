"""The real ttnn on a cluster that is only described: real checks and programs, memory that reads as zeros.

ttnn wants a compiler for the kernels of its programs. A stand-in for it is put into a root folder of its own,
made of links into the installed ttnn, which stays as it is; only processes that are given both this root and
a mock cluster ever meet it.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from .clusters import CLUSTERS

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools" / "riscv-binutils"
PACKAGE = "binutils-riscv64-unknown-elf"
ASSEMBLER = "riscv64-unknown-elf-as"
STUB = """
.option relax
.section .start,"ax",@progbits
.globl _start
.type _start,@function
_start:
jal zero, 1f
1: jalr zero, 0(ra)
"""


def environment(cluster: str, folder: Path) -> dict[str, str]:
    """What a process needs to open `cluster`, one of CLUSTERS; everything it writes goes to `folder`."""
    installed = ttnn_root()
    root, description = folder / "root", folder / f"{cluster}.yaml"
    binutils = binutils_folder()
    if not root.exists():
        link_root(root, installed, binutils)
    description.write_text(CLUSTERS[cluster].described())
    return os.environ | {
        "PATH": f"{binutils}:{os.environ['PATH']}",
        "STAND_IN_VERSION": compiler_version(installed),
        "TT_METAL_RUNTIME_ROOT": str(root),
        "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(description),
        "TT_METAL_CACHE": str(folder / "kernels"),
        "TT_METAL_LOGS_PATH": str(folder / "logs"),
        "TT_LOGGER_LEVEL": "off",
        "LOGURU_LEVEL": "WARNING",
    }


def ttnn_root() -> Path:
    found = importlib.util.find_spec("ttnn")
    assert found is not None, "ttnn is not installed"
    return Path(str(found.origin)).parent


def compiler_version(installed: Path) -> str:
    """As the compiler must print it, or ttnn does not use the firmware that comes with it."""
    text = (installed / "tt_metal" / "sfpi-version").read_text()
    told = dict(re.findall(r"^(\w+)='(.*)'$", text, re.MULTILINE))
    return f"{told['sfpi_version']}[{told['sfpi_build']}]"


def link_root(root: Path, installed: Path, binutils: Path) -> None:
    compiler = root / "runtime" / "sfpi" / "compiler" / "bin"
    compiler.mkdir(parents=True)
    for path in (*installed.iterdir(), *(installed / "runtime").iterdir()):
        if path.name != "runtime":
            (root / path.relative_to(installed)).symlink_to(path)
    shutil.copy(Path(__file__).with_name("stand_in_compiler.sh"), compiler / "riscv-tt-elf-g++")
    (compiler / "riscv-tt-elf-g++").chmod(0o755)
    assemble = [
        str(binutils / ASSEMBLER),
        "-march=rv32im",
        "-mabi=ilp32",
        "-o",
        str(compiler / "stub.o"),
        "-",
    ]
    subprocess.run(assemble, input=STUB, text=True, check=True)


def binutils_folder() -> Path:
    """Where an assembler and a linker for RISC-V are; Debian's are unpacked beside our tools if need be."""
    found = shutil.which(ASSEMBLER)
    if found is not None:
        return Path(found).parent
    unpacked = TOOLS / "usr" / "bin"
    if not (unpacked / ASSEMBLER).exists():
        TOOLS.mkdir(parents=True, exist_ok=True)
        fetch = ["apt-get", "download", PACKAGE]
        if subprocess.run(fetch, cwd=TOOLS, check=False).returncode:
            subprocess.run(["apt-get", "update"], check=False)
            fetched = subprocess.run(fetch, cwd=TOOLS, check=False).returncode == 0
            assert fetched, f"no {ASSEMBLER} on PATH, and apt-get gave none: install {PACKAGE}"
        (archive,) = TOOLS.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive), str(TOOLS)], check=True)
    return unpacked
