import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points

import pytest
import vllm_tt_plugin


def test_public_names() -> None:
    assert vllm_tt_plugin.__all__ == []


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("vllm.platform_plugins", "tt", "vllm_tt_plugin.entrypoints:platform_plugin"),
        ("vllm.general_plugins", "tt_model_registry", "vllm_tt_plugin.entrypoints:register"),
        ("console_scripts", "tt-vllm", "vllm_tt_plugin.cli:main"),
    ],
)
def test_entry_points(group: str, name: str, value: str) -> None:
    (found,) = entry_points(group=group, name=name)
    assert found.value == value
    assert callable(found.load())


def test_errors_form_one_tree() -> None:
    errors = import_module("vllm_tt_plugin.errors")
    for name in ("ConfigurationError", "MeshError", "StepError"):
        assert issubclass(getattr(errors, name), errors.TTPluginError)
    assert issubclass(errors.ConfigurationError, ValueError)


def test_entry_points_import_nothing_that_could_fail() -> None:
    code = (
        "import sys; before = set(sys.modules); import vllm_tt_plugin.entrypoints;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['vllm_tt_plugin']"
