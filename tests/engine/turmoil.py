"""Arrivals, aborts and preemptions at any moment, the same for the same seed."""

from collections.abc import Callable, Sequence
from random import Random

from .drive import Driver


def turmoil(driver: Driver, arrivals: Sequence[Callable[[], object]], seed: int) -> None:
    """Let requests arrive in this order, and steps, aborts and cache resets happen between them."""
    chance = Random(seed)
    for arrive in arrivals:
        arrive()
        driver.step(chance.randint(0, 6))
        running = sorted(driver.tokens.keys() - driver.finished.keys())
        if running and chance.random() < 0.25:
            driver.abort(chance.choice(running))
        if chance.random() < 0.25:
            driver.reset_running()
    driver.drain()
