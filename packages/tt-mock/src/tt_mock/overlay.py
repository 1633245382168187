"""What a process needs to open a cluster that is only described.

Its checks and programs are real, its memory reads as zeros.

ttnn wants a compiler for the kernels of its programs. A stand-in for it is put into a root folder of its own,
made of links into the installed ttnn, which stays as it is; only processes that are given both this root and
a mock cluster ever meet it.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tt_mock.clusters import CLUSTERS
from tt_mock.errors import ClusterError

PACKAGE = "binutils-riscv64-unknown-elf"
ASSEMBLER = "riscv64-unknown-elf-as"
COMPILER = "riscv-tt-elf-g++"
STUB = """
.option relax
.section .start,"ax",@progbits
.globl _start
.type _start,@function
_start:
jal zero, 1f
1: jalr zero, 0(ra)
"""


def environment(cluster: str, folder: Path, tools: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of `base`, and those with which a process opens `cluster`, a name of CLUSTERS.

    What ttnn writes goes to `folder`, but for some KiB of shared memory for each chip. Clusters and processes
    may share it; nothing else may.
    An assembler is unpacked into `tools` where there is none. Raises ClusterError for another name, and where
    ttnn is missing or no assembler can be had.
    """
    if cluster not in CLUSTERS:
        raise ClusterError(f"no cluster is called {cluster!r}; there are {', '.join(CLUSTERS)}")
    installed = ttnn_root()
    binutils = binutils_folder(tools)
    root, description = folder / "root", folder / f"{cluster}.yaml"
    if not root.exists():
        link_root(root, installed, binutils)
    description.write_text(CLUSTERS[cluster].described())
    return {
        **base,
        "PATH": f"{binutils}:{base.get('PATH', '')}",
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
    if found is None or found.origin is None:
        raise ClusterError("ttnn is not installed: pip install 'tt-mock[ttnn]'")
    return Path(found.origin).parent


def compiler_version(installed: Path) -> str:
    """As the compiler must print it, or ttnn does not use the firmware that comes with it."""
    text = (installed / "tt_metal" / "sfpi-version").read_text()
    told = dict(re.findall(r"^(\w+)='(.*)'$", text, re.MULTILINE))
    return f"{told['sfpi_version']}[{told['sfpi_build']}]"


def link_root(root: Path, installed: Path, binutils: Path) -> None:
    """Make `root`: links to all of `installed` but its compiler, which the stand-in takes the place of."""
    compiler = root / "runtime" / "sfpi" / "compiler" / "bin"
    compiler.mkdir(parents=True)
    for path in (*installed.iterdir(), *(installed / "runtime").iterdir()):
        if path.name not in ("runtime", "sfpi"):
            (root / path.relative_to(installed)).symlink_to(path)
    shutil.copy(Path(__file__).with_name("stand_in_compiler.sh"), compiler / COMPILER)
    (compiler / COMPILER).chmod(0o755)
    stub = compiler / "stub.o"
    assemble: list[str | Path] = [binutils / ASSEMBLER, "-march=rv32im", "-mabi=ilp32", "-o", stub, "-"]
    subprocess.run(assemble, input=STUB, text=True, check=True)


def binutils_folder(place: Path) -> Path:
    """Where an assembler and a linker for RISC-V are; Debian's are unpacked into `place` if need be.

    Raises ClusterError where there are none and none can be had.
    """
    found = shutil.which(ASSEMBLER)
    if found is not None:
        return Path(found).parent
    unpacked = place / "usr" / "bin"
    if not (unpacked / ASSEMBLER).exists():
        _unpack(place)
    return unpacked


def _unpack(place: Path) -> None:
    fetch = ["apt-get", "download", PACKAGE]
    try:
        if subprocess.run(fetch, cwd=place, check=False).returncode:
            subprocess.run(["apt-get", "update"], check=False)
            subprocess.run(fetch, cwd=place, check=True)
        (archive,) = place.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive), str(place)], check=True)
    except (OSError, subprocess.CalledProcessError) as failure:
        raise ClusterError(f"no {ASSEMBLER} on PATH, and apt-get gave none: install {PACKAGE}") from failure
