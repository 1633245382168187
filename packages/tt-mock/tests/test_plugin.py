"""pytest finds the plugin, and it stays out of the way."""

import subprocess
import sys
from pathlib import Path

UNRELATED = """
import sys

def test_nothing_is_imported(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("tt_mock")
    ours = {name for name in sys.modules if name.startswith("tt_mock")}
    assert ours == {"tt_mock", "tt_mock.plugin"}
    assert not {"attrs", "torch", "ttnn"} & sys.modules.keys()
"""
WITH_FIXTURE = """
import os
from pathlib import Path

def in_child(word):
    return [word, os.environ["MORE"], Path.cwd().name]

def test_a_wrong_name(tt_mock):
    import pytest, tt_mock as kit
    with pytest.raises(kit.ClusterError, match="no cluster is called 't4k'; there are n150, n300, t3k,"):
        tt_mock.environment("t4k")

def test_the_kernels_have_a_folder(tt_mock, pytestconfig, request):
    assert tt_mock.folder.is_dir()
    assert tt_mock.start == pytestconfig.rootpath
    assert request.getfixturevalue("tt_mock") is tt_mock
"""


def ended(folder: Path, text: str, *options: str) -> str:
    (folder / "test_of_a_user.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), *options, str(folder)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


def test_an_unrelated_run_imports_nothing(tmp_path: Path) -> None:
    assert "1 passed" in ended(tmp_path, UNRELATED)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".py") == ["test_of_a_user.py"]
    assert not (tmp_path / ".pytest_cache" / "d").exists()


def test_the_fixture_is_there_with_and_without_a_cache(tmp_path: Path) -> None:
    assert "2 passed" in ended(tmp_path, WITH_FIXTURE)
    assert "2 passed" in ended(tmp_path, WITH_FIXTURE, "-p", "no:cacheprovider")
