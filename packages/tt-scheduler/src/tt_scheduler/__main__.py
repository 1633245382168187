"""``python -m tt_scheduler``: see ``simulate --help``."""

from tt_scheduler.sim.command import main

main()
