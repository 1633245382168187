"""What is installed, and whether vLLM will choose this platform."""

from collections.abc import Iterator

from vllm_tt_plugin.doctor.facts import Facts, Plugin
from vllm_tt_plugin.doctor.finding import Finding
from vllm_tt_plugin.entrypoints import GENERAL_PLUGIN, PLATFORM_PLUGIN, SUPPORTED_VLLM, supports

TRIED_TTNN = "0.81"
"""Whose rules the tests of this package read."""


def installation_findings(facts: Facts) -> Iterator[Finding]:
    """Versions, what declared requirements miss, and the plugins that vLLM will load."""
    yield from _vllm_findings(facts)
    yield from _ttnn_findings(facts)
    for missing in facts.unmet:
        fix = "Install what is asked for" if "numpy" not in missing else _NUMPY_FIX
        yield Finding("versions", "problem", missing, fix)
    yield from _plugin_findings(facts)
    yield from _platform_findings(facts)


_NUMPY_FIX = (
    "pip install 'numpy<2' 'opencv-python-headless<4.12': newer OpenCV, which vLLM asks for, needs numpy 2"
)


def _vllm_findings(facts: Facts) -> Iterator[Finding]:
    installed = facts.versions.get("vllm")
    if installed is None:
        yield Finding(
            "versions",
            "problem",
            "vLLM is not installed",
            f"Build vLLM {SUPPORTED_VLLM} here with VLLM_TARGET_DEVICE=empty",
        )
    elif not supports(installed):
        yield Finding(
            "versions",
            "problem",
            f"vLLM {installed} is installed, and this release works with {SUPPORTED_VLLM}.x",
            f"Install vLLM {SUPPORTED_VLLM}.x, or the release of this plugin for {installed}",
        )
    else:
        others = [f"{name} {facts.versions[name]}" for name in ("torch", "numpy") if facts.versions.get(name)]
        yield Finding("versions", "ok", ", ".join([f"vLLM {installed}", *others]))
    if facts.vllm_has_kernels:
        yield Finding(
            "versions",
            "warning",
            "this vLLM was built for another kind of device, and may have brought its own torch and numpy",
            "Build it with VLLM_TARGET_DEVICE=empty and --no-deps over the environment of TT-Metal",
        )


def _ttnn_findings(facts: Facts) -> Iterator[Finding]:
    if facts.ttnn_path is None:
        return
    installed = facts.versions.get("ttnn")
    text = f"ttnn {installed or 'of unknown version'} at {facts.ttnn_path}"
    if installed is None or installed.split("+")[0].split(".")[:2] == TRIED_TTNN.split("."):
        yield Finding("versions", "ok", text)
    else:
        yield Finding(
            "versions",
            "warning",
            f"{text}; this release was tried with {TRIED_TTNN}",
            "If it fails, try that version",
        )


def _plugin_findings(facts: Facts) -> Iterator[Finding]:
    allowed = facts.environ.get("VLLM_PLUGINS")
    names = {PLATFORM_PLUGIN: facts.platform_plugins, GENERAL_PLUGIN: facts.general_plugins}
    absent = [name for name, there in names.items() if all(plugin.name != name for plugin in there)]
    # vLLM splits at commas and strips nothing.
    left_out = [] if allowed is None else [name for name in names if name not in allowed.split(",")]
    if absent:
        yield Finding(
            "plugins",
            "problem",
            f"vLLM cannot find {' and '.join(absent)}: tt-vllm-plugin is on the path but not installed",
            "pip install --no-deps tt-vllm-plugin, into the environment that holds vLLM",
        )
    if left_out:
        kept = [name.strip() for name in (allowed or "").split(",") if name.strip()]
        wanted = ",".join(dict.fromkeys([*kept, *names]))
        yield Finding(
            "plugins",
            "problem",
            f"VLLM_PLUGINS is {allowed!r} and leaves out {' and '.join(left_out)}",
            f"Unset it, or set VLLM_PLUGINS={wanted}",
        )
    if not absent and not left_out:
        yield Finding("plugins", "ok", f"vLLM loads {' and '.join(names)}")


def _platform_findings(facts: Facts) -> Iterator[Finding]:
    if facts.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        yield Finding(
            "plugins",
            "problem",
            "VLLM_TARGET_DEVICE is 'cpu', so vLLM takes its CPU platform and asks no plugin",
            "Unset it; it is for building vLLM",
        )
    for plugin in other_plugins(facts):
        steps_in = facts.other_platforms.get(plugin.name)
        yield Finding(
            "plugins",
            "problem" if steps_in else "ok",
            f"{plugin.distribution} brings a platform plugin {plugin.name!r}"
            + (
                f" that gives {steps_in}; vLLM takes one and fails with two"
                if steps_in
                else ", which stays away"
            ),
            f"Uninstall it, or set VLLM_PLUGINS={PLATFORM_PLUGIN},{GENERAL_PLUGIN}" if steps_in else "",
        )
    if facts.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        yield Finding(
            "plugins",
            "warning",
            f"VLLM_USE_V2_MODEL_RUNNER is {facts.environ['VLLM_USE_V2_MODEL_RUNNER']!r}:"
            " custom logits processors are refused",
            "Unset it",
        )


def other_plugins(facts: Facts) -> list[Plugin]:
    """Platform plugins that are not ours and that ``VLLM_PLUGINS`` lets in."""
    allowed = facts.environ.get("VLLM_PLUGINS")
    return [
        plugin
        for plugin in facts.platform_plugins
        if plugin.name != PLATFORM_PLUGIN and (allowed is None or plugin.name in allowed.split(","))
    ]
