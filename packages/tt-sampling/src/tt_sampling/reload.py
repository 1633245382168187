"""What the next decode call must tell a model that keeps its inputs and sampling state on the device.

A model of version 1 (`decode_input_update_contract = 1`) takes four commands with every decode; one of
version 0 takes `reset_batch` with every decode that it samples. Both come from the same two facts about the
device: whether the inputs of its last decode still continue, and whether its sampling state does.
"""

import attrs

from tt_sampling.routing import Phase


@attrs.frozen
class ReloadCommands:
    """The commands of one decode call; `attrs.asdict` gives the keyword arguments of version 1."""

    reload_inputs: bool = False
    reload_page_table: bool = False
    reload_sampling_params: bool = False
    reset_sampling_state: bool = False

    @property
    def reset_batch(self) -> bool:
        """Version 0's flag; meaningful only on decodes that the device samples."""
        return self.reload_sampling_params or self.reset_sampling_state

    @property
    def steady(self) -> bool:
        """Whether the decode may be queued behind one in flight. If not, drain and apply its tokens first."""
        return not (self.reload_inputs or self.reset_batch)


@attrs.frozen
class StepFacts:
    """What happened up to and in one step.

    `phase` is None for a step that ran no model but may have removed rows. `rows_changed`: rows were added,
    removed, preempted, resumed or moved since the last step. `blocks_changed`: the page table of a row that
    stayed has changed. `params_changed`: a row that stayed has other sampling parameters. `traced` and
    `async_supported` say how this decode runs: only a traced decode of a model that supports async decode
    keeps tokens and positions on the device.
    """

    phase: Phase | None
    on_device: bool = False
    rows_changed: bool = False
    blocks_changed: bool = False
    params_changed: bool = False
    traced: bool = True
    async_supported: bool = True


@attrs.frozen
class ReloadState:
    """What the device still holds from the last step: inputs to go on from, and sampling state."""

    inputs_kept: bool = False
    sampling_kept: bool = False


def advance(state: ReloadState, facts: StepFacts) -> tuple[ReloadState, ReloadCommands | None]:
    """The state after a step, and the commands of its decode call (None unless it is a decode).

    Keep the old state if the model did not accept the call.
    """
    changed = facts.rows_changed or facts.blocks_changed or facts.params_changed
    if facts.phase is None:
        return (ReloadState() if changed else state), None
    if facts.phase is Phase.PREFILL:
        return ReloadState(), None
    if not facts.on_device:
        return ReloadState(), ReloadCommands(reload_inputs=True)
    keeps_inputs = facts.traced and facts.async_supported
    transition = facts.rows_changed or not state.sampling_kept
    inputs = transition or not keeps_inputs or not state.inputs_kept
    commands = ReloadCommands(
        reload_inputs=inputs,
        reload_page_table=facts.blocks_changed and not inputs,
        reload_sampling_params=transition or facts.params_changed,
        reset_sampling_state=transition,
    )
    return ReloadState(inputs_kept=keeps_inputs, sampling_kept=True), commands
