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
HARVESTED = 32
"""One row of cores taken out, as a mask: with dispatch on worker cores the grid is that of a real N300."""
# Of a T3K, whose boards hold a left chip (0 to 3) and a right one (4 to 7): two chips to their channels.
LINKS = {
    **{(chip, chip + 4): ((8, 0), (9, 1)) for chip in range(4)},
    **{
        (0, 2): ((6, 6), (7, 7)),
        (1, 3): ((0, 0), (1, 1)),
        (4, 5): ((6, 6), (7, 7)),
        (6, 7): ((6, 6), (7, 7)),
    },
    **{(0, 1): ((14, 14), (15, 15)), (2, 3): ((14, 14), (15, 15))},
}
PLACES = {4: (0, 0), 0: (1, 0), 2: (2, 0), 6: (3, 0), 5: (0, 1), 1: (1, 1), 3: (2, 1), 7: (3, 1)}


def environment(cluster: str, folder: Path) -> dict[str, str]:
    """What a process needs to open `cluster`, n150 or t3k; everything it writes goes to `folder`."""
    installed = ttnn_root()
    root, description = folder / "root", folder / f"{cluster}.yaml"
    binutils = binutils_folder()
    if not root.exists():
        link_root(root, installed, binutils)
    description.write_text(DESCRIPTIONS[cluster]())
    return os.environ | {
        "PATH": f"{binutils}:{os.environ['PATH']}",
        "STAND_IN_VERSION": compiler_version(installed),
        "TT_METAL_RUNTIME_ROOT": str(root),
        "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(description),
        "TT_METAL_CACHE": str(folder / f"{cluster}-kernels"),
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


def n150() -> str:
    return f"""
arch: {{0: Wormhole}}
chips: {{0: [0, 0, 0, 0]}}
ethernet_connections: []
chips_with_mmio: [0: 0]
harvesting: {{0: {{noc_translation: true, harvest_mask: {HARVESTED}}}}}
boards: [[{{board_id: 72059269369839682}}, {{board_type: n150}}, {{chips: [0]}}]]
"""


def t3k() -> str:
    """Four N300 in a grid of 4 by 2 chips."""
    chips = range(8)
    ends = [(a, p, b, q) for (a, b), channels in LINKS.items() for p, q in channels]
    connections = [f"[{{chip: {a}, chan: {p}}}, {{chip: {b}, chan: {q}}}]" for a, p, b, q in ends]
    boards = [
        f"[{{board_id: {72058994491072686 + left}}}, {{board_type: n300}}, {{chips: [{left}, {left + 4}]}}]"
        for left in range(4)
    ]
    masks = [f"{chip}: {{noc_translation: true, harvest_mask: {HARVESTED}}}" for chip in chips]
    return f"""
arch: {{{", ".join(f"{chip}: wormhole_b0" for chip in chips)}}}
chips: {{{", ".join(f"{chip}: [{x}, {y}, 0, 0]" for chip, (x, y) in PLACES.items())}}}
chip_unique_ids: {{{", ".join(f"{chip}: {1000004 + chip}" for chip in chips)}}}
ethernet_connections: [{", ".join(connections)}]
chips_with_mmio: [{", ".join(f"{chip}: {chip}" for chip in range(4))}]
harvesting: {{{", ".join(masks)}}}
chip_to_boardtype: {{{", ".join(f"{chip}: n300" for chip in chips)}}}
boards: [{", ".join(boards)}]
"""


DESCRIPTIONS = {"n150": n150, "t3k": t3k}
