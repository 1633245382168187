"""Questions whose answer means running somebody else's code: asked in child processes."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_TIMEOUT_S = 120

_FRAME = """
import json, sys
def answer(given):
{body}
print("\\nanswer", json.dumps(answer(sys.argv[1:])))
"""
_BUNDLES = """
    from tt_registry import check_bundle
    return {path: [str(finding) for finding in check_bundle(path).findings] for path in given}
"""
_PLATFORMS = """
    from importlib.metadata import entry_points
    answers = {}
    for plugin in entry_points(group="vllm.platform_plugins"):
        if plugin.name in given:
            try:
                answers[plugin.name] = plugin.load()()
            except Exception:
                pass  # vLLM passes over it too
    return {name: path for name, path in answers.items() if path}
"""


def bundle_findings(folders: Sequence[str]) -> tuple[str, ...]:
    """What keeps bundles from being served; their code is imported."""
    told = _ask(_BUNDLES, folders)
    if isinstance(told, str):
        return (f"the bundles {', '.join(folders)} cannot be imported: {told}",)
    return tuple(f"bundle {path}: {finding}" for path, found in told.items() for finding in found)


def platforms_given(plugins: Sequence[str]) -> dict[str, str]:
    """The platform classes that these plugins give vLLM here; those that stay away or fail are left out."""
    told = _ask(_PLATFORMS, plugins)
    return {} if isinstance(told, str) else told


def _ask(body: str, given: Sequence[str]) -> dict[str, Any] | str:
    """What ``body`` returns for ``given``, or in words why nothing came back."""
    if not given:
        return {}
    command = [sys.executable, "-c", _FRAME.format(body=body), *given]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_S} s"
    if found := re.findall(r"^answer (.*)$", child.stdout, re.MULTILINE):
        told: dict[str, Any] = json.loads(found[-1])
        return told
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    return f"their process ended with {child.returncode}: {lines[-1] if lines else 'without a word'}"
