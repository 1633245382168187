import contextlib
import io
import re
from importlib.metadata import metadata
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_prints_what_it_says() -> None:
    # Tests of the wheel are away from the file, but the wheel carries its text.
    readme = README.read_text() if README.exists() else metadata("tt-scheduler")["Description"]
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example[1], {})
    assert printed.getvalue().splitlines() == [
        "0 1",
        "first chunk False",
        "later chunk False",
        "the old request gets its token",
        "later chunk True",
        "decode",
        "0 {'new': 1, 'next': 0}",
    ]
