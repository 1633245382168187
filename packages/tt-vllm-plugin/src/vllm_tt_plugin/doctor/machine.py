"""What the operating system says: the driver's files, who has them open, and free memory."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_tt_plugin.doctor.facts import Holder


def driver_files(folder: Path) -> tuple[str, ...]:
    """The cards that the driver shows, by number."""
    return tuple(sorted((path.name for path in folder.glob("*") if path.name.isdigit()), key=int))


def holders(folder: Path, processes: Path = Path("/proc")) -> Iterator[Holder]:
    """Processes with a file under ``folder`` open, as far as this user may look."""
    for process in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if any(target.is_relative_to(folder) for target in _open_files(process)):
                yield Holder(int(process.name), (process / "comm").read_text().strip())


def _open_files(process: Path) -> Iterator[Path]:
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield link.readlink()


def memory_available(root: Path = Path("/")) -> int:
    """Bytes that new processes can have: what the kernel says, or what a container's limit leaves."""
    told = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    assert told is not None, "every Linux since 3.14 has MemAvailable"
    available = int(told[1]) * 1024
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # no limit is written as "max"
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available
