"""What vLLM calls first. Only the standard library is imported here: an entry point that fails to import is
logged by vLLM and then passed over, so that another platform would serve in silence."""

import atexit
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile

logger = logging.getLogger("vllm.tt_plugin")

PLATFORM_PLUGIN = "tt"
GENERAL_PLUGIN = "tt_model_registry"
TT_PLATFORM = "vllm_tt_plugin.platform.TTPlatform"
SUPPORTED_VLLM = "0.33"
"""vLLM is no declared dependency, since its published wheels are built for CUDA; so it is checked at load."""


def platform_plugin() -> str | None:
    """The path of ``TTPlatform``, or None where neither a host mesh is asked for nor ttnn is installed.

    ttnn that is installed but broken still activates the platform, which then refuses to serve and says why:
    staying away would let another platform serve in its place.
    """
    on_host = os.environ.get("MESH_DEVICE", "").strip().startswith("host")
    if on_host or importlib.util.find_spec("ttnn") is not None:
        _share_metrics()
        return TT_PLATFORM
    logger.debug("ttnn is not installed and MESH_DEVICE does not name a host mesh; staying out of the way")
    return None


def _share_metrics() -> None:
    """Choose Prometheus's multiprocess mode for this server, whose counters live in the engine's process.

    prometheus_client settles its mode when it is imported, so this has to come first. Processes that are
    started later inherit the folder; the one that made it removes it.
    """
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="tt-vllm-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    maker = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == maker else None)


def register() -> None:
    """Make the adapters' classes known to vLLM. Runs in every process of a server.

    Raises ``ConfigurationError`` if vLLM's version is not supported. It is raised here and not in
    ``platform_plugin``, whose exceptions vLLM passes over.
    """
    if platform_plugin() is None:
        return
    _check_version(importlib.metadata.version("vllm"))
    from vllm.platforms import current_platform

    from vllm_tt_plugin.platform import TTPlatform

    if not isinstance(current_platform, TTPlatform):
        return
    from vllm_tt_plugin.served_model import register_with_vllm

    register_with_vllm(os.environ)


def supports(version: str) -> bool:
    """Whether this release works with that version of vLLM."""
    return version.split(".")[:2] == SUPPORTED_VLLM.split(".")


def _check_version(installed: str) -> None:
    if not supports(installed):
        from vllm_tt_plugin.errors import ConfigurationError, Problem

        raise ConfigurationError(
            [
                Problem(
                    f"vLLM {installed} is installed, and this release works with {SUPPORTED_VLLM}.x",
                    f"Install vLLM {SUPPORTED_VLLM}.x, or the release of this plugin for {installed}",
                )
            ]
        )
