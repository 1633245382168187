"""What the README of tt-mock shows runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tt_mock import MockClusters

README = Path(__file__).resolve().parents[2] / "packages" / "tt-mock" / "README.md"


def test_example_passes(tmp_path: Path, tt_mock: MockClusters) -> None:
    """In files of the names that it gives, by pytest alone, as a reader would."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert [name for name, _ in blocks] == ["my_model.py", "test_my_model.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    # An assembler that was fetched for other tests is not fetched again.
    env = {**os.environ, "PATH": tt_mock.environment("t3k")["PATH"]}
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
