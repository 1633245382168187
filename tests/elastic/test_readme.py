"""What the README of elastic-ep shows runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from elastic_ep.testing.toy_group import ENVIRONMENT

README = Path(__file__).resolve().parents[2] / "packages" / "elastic-ep" / "README.md"


def test_examples_run(tmp_path: Path) -> None:
    """One after the other in a fresh process, as a reader would: a group grows by rank 2 and loses rank 0."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    example = tmp_path / "example.py"
    example.write_text("\n".join(blocks))
    ran = subprocess.run(
        [sys.executable, example],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    *copies, last = ran.stdout.splitlines()
    assert copies
    assert all(re.fullmatch(r"layer \d: expert \d from slot \d+ to \d+", line) for line in copies)
    assert re.fullmatch(r"\(1, 2\) \d+", last)
