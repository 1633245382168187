import re
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path

import attrs
from vllm_tt_plugin.config import TTConfig

README = Path(__file__).parent.parent / "README.md"


def text() -> str:
    """Tests of the wheel are away from the file, but the wheel carries its text."""
    return README.read_text() if README.exists() else metadata("tt-vllm-plugin")["Description"]


def test_the_table_has_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \| .* \|$", text(), re.MULTILINE)
    said = {key: default.strip("`") for key, default in rows}
    fields = attrs.fields_dict(TTConfig)
    assert list(said) == list(fields)
    for key, field in fields.items():
        if isinstance(field.default, bool):
            assert said[key] == str(field.default).lower()
        elif isinstance(field.default, int):
            assert said[key] == f"{field.default:,}".replace(",", " ")
        else:
            assert not said[key].isdigit()


def test_the_main_path_names_modules_that_exist() -> None:
    named = re.findall(r"`(\w+)\.py`", text())
    assert "runner" in named
    assert [name for name in named if find_spec(f"vllm_tt_plugin.{name}") is None] == []
