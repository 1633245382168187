"""What vLLM calls first. Only the standard library is imported here: an entry point that fails to import is
logged by vLLM and then passed over, so that another platform would serve in silence."""

import importlib.util
import logging
import os

logger = logging.getLogger("vllm.tt_plugin")

TT_PLATFORM = "vllm_tt_plugin.platform.TTPlatform"


def platform_plugin() -> str | None:
    """The path of ``TTPlatform``, or None where neither a host mesh is asked for nor ttnn is installed.

    ttnn that is installed but broken still activates the platform, which then refuses to serve and says why:
    staying away would let another platform serve in its place.
    """
    on_host = os.environ.get("MESH_DEVICE", "").strip().startswith("host")
    if on_host or importlib.util.find_spec("ttnn") is not None:
        return TT_PLATFORM
    logger.debug("ttnn is not installed and MESH_DEVICE does not name a host mesh; staying out of the way")
    return None


def register() -> None:
    """Make the adapters' classes known to vLLM. Runs in every process of a server."""
    from vllm.platforms import current_platform

    from vllm_tt_plugin.platform import TTPlatform

    if not isinstance(current_platform, TTPlatform):
        return
    from vllm_tt_plugin.served_model import register_with_vllm

    register_with_vllm(os.environ)
