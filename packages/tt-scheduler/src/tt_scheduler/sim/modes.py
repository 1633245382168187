"""Policies by the names that the command line and benchmarks know them by."""

from collections.abc import Callable

from tt_scheduler.bounded_gap import BoundedGap
from tt_scheduler.phases import Interleave, PrefillFirst
from tt_scheduler.sim.engine import MixedBudget, Mode, PhasePure, Setup
from tt_scheduler.step_costs import Line

MODES = ("prefill-first", "interleave[:PREFILLS:DECODES]", "bounded-gap:SECONDS", "mixed[:STEP_TOKENS]")
"""The names, with the numbers that may follow."""


def mode_named(text: str, setup: Setup) -> Mode:
    """A fresh mode, such as ``interleave:2:1`` or ``bounded-gap:0.9``.

    A bounded gap starts from the costs of the setup's device, as a warm-up would have measured them. Raises
    ``ValueError`` if the text is none of ``MODES``.
    """
    name, *numbers = text.split(":")
    sizes = setup.device.padded_to
    makers: dict[str, Callable[..., Mode]] = {
        "prefill-first": lambda: PhasePure(PrefillFirst(), sizes),
        "interleave": lambda *counts: PhasePure(Interleave(*map(int, counts)), sizes),
        "bounded-gap": lambda target: _bounded_gap(float(target), setup),
        "mixed": lambda *tokens: MixedBudget(*map(int, tokens)),
    }
    try:
        return makers[name](*numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is no policy ({error}); expected one of {', '.join(MODES)}") from error


def _bounded_gap(target_s: float, setup: Setup) -> PhasePure:
    device = setup.device
    sizes = tuple(size for size in device.padded_to if size <= setup.step_tokens) or (setup.step_tokens,)
    policy = BoundedGap(
        target_s,
        sizes,
        prefill_prior=Line(device.prefill_fixed_s + device.switch_s, device.prefill_token_s),
        decode_prior=Line(device.decode_fixed_s + device.switch_s, device.decode_row_s),
        lanes=setup.lanes,
    )
    return PhasePure(policy, sizes)
