"""Warm-up before the first request, and a watch on what is compiled after it all the same.

A program that is compiled while requests run holds them up for seconds, and one that is compiled after a
trace was captured may corrupt that trace's memory. So warm-up runs everything once without traces, and then
again to capture them; whatever is compiled later is counted and said.
"""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from tqdm import tqdm
from tt_scheduler import Phase

from vllm_tt_plugin.adapter import Adapter

logger = logging.getLogger("vllm.tt_plugin")


def warm_up(adapter: Adapter, can_sample_on_device: bool) -> None:
    """Compile every program, then capture traces of the phases that are traced."""
    start, before = time.monotonic(), compiled_programs(adapter.mesh.device)
    with tqdm(list(_calls(adapter, can_sample_on_device)), desc="Warm-up", unit="pass") as progress:
        for what, call in progress:
            progress.set_postfix_str(what)
            call()
    after = compiled_programs(adapter.mesh.device)
    programs = "" if before is None or after is None else f": {after - before} programs compiled"
    logger.info("Warm-up took %.1f s%s.", time.monotonic() - start, programs)


def _calls(adapter: Adapter, can_sample_on_device: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    config = adapter.config
    passes = [(False, False)]
    if config.traces_prefill or config.traces_decode:
        passes.append((config.traces_prefill, config.traces_decode))
    for prefill_traced, decode_traced in passes:
        for phase, warm, traced in (
            ("prefill", _prefill, prefill_traced),
            ("decode", _decode, decode_traced),
        ):
            doing = "capture" if traced else "compile"
            yield f"{doing} {phase}", partial(warm, adapter, traced, can_sample_on_device)


def _prefill(adapter: Adapter, traced: bool, can_sample_on_device: bool) -> None:
    if hasattr(adapter.model, "already_warmed_up_prefill"):
        # TT-Metal's generators skip a second one unless this is cleared.
        adapter.model.already_warmed_up_prefill = False
    adapter.model.warmup_model_prefill(
        kv_cache=adapter.kv_cache, enable_trace=traced, can_sample_on_device=can_sample_on_device
    )


def _decode(adapter: Adapter, traced: bool, can_sample_on_device: bool) -> None:
    adapter.model.warmup_model_decode(
        kv_cache=adapter.kv_cache,
        max_batch_size=adapter.max_rows,
        num_blocks=adapter.page_tables.width,
        can_sample_on_device=can_sample_on_device,
        enable_trace=traced,
    )


def compiled_programs(device: Any) -> int | None:
    """How many programs a mesh device holds, or None for one that cannot tell, as the host mesh's."""
    count = getattr(device, "num_program_cache_entries", None)
    return None if count is None else int(count())


class ProgramWatch:
    """Counts the programs that steps compile; make one when warm-up is over."""

    def __init__(self, device: Any, registry: CollectorRegistry | None = None) -> None:
        self._device = device
        self._known = compiled_programs(device)
        self._total = Counter(
            "tt:programs_compiled_after_warmup", "Programs that steps had to compile.", registry=registry
        )

    def look(self, phase: Phase) -> None:
        """Look after a step."""
        if self._known is None:
            return
        now = compiled_programs(self._device) or 0
        if now > self._known:
            self._total.inc(now - self._known)
            logger.warning(
                "A %s step compiled %d programs after warm-up. It held all requests up, and may have written"
                " over the memory of a captured trace: let the model's warm-up cover this shape, or set"
                " additional_config.tt.trace_mode to 'none'.",
                phase.value,
                now - self._known,
            )
        self._known = now
