"""What the device still holds from the last step, and so what the next decode must tell it."""

import attrs
from tt_sampling import Phase, ReloadCommands, ReloadState, StepFacts, advance


@attrs.define
class Reloads:
    """Follows the steps of one adapter by the rules of ``tt_sampling.advance``.

    Most decodes repeat the one before: the same facts, and a state that they leave as it was. Those get the
    same commands without asking again.
    """

    traced: bool
    """Whether decodes run as a trace."""
    async_supported: bool
    """Whether the model keeps its inputs on the device."""
    _state: ReloadState = attrs.field(factory=ReloadState, init=False)
    _asked: tuple[ReloadState, bool, bool, bool] | None = attrs.field(default=None, init=False)
    """State and facts of the last decode."""
    _answer: tuple[ReloadState, ReloadCommands] = attrs.field(init=False)

    def decode(self, on_device: bool, rows_changed: bool, blocks_changed: bool) -> ReloadCommands:
        """The commands of a decode; ``submitted`` tells that the adapter has taken it."""
        asks = self._state, on_device, rows_changed, blocks_changed
        if asks != self._asked:
            facts = StepFacts(
                Phase.DECODE,
                on_device=on_device,
                rows_changed=rows_changed,
                blocks_changed=blocks_changed,
                traced=self.traced,
                async_supported=self.async_supported,
            )
            after, commands = advance(self._state, facts)
            assert commands is not None, "a decode always has commands"
            self._asked, self._answer = asks, (after, commands)
        return self._answer[1]

    def submitted(self) -> None:
        self._state = self._answer[0]

    def prefill(self) -> None:
        """A prefill ran."""
        self._state, _ = advance(self._state, StepFacts(Phase.PREFILL))

    def idle(self, rows_changed: bool) -> None:
        """A step without work, in which rows may have been taken and given back."""
        self._state, _ = advance(self._state, StepFacts(None, rows_changed=rows_changed))
