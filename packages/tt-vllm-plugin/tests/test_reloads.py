from hypothesis import given
from hypothesis import strategies as st
from tt_sampling import Phase, ReloadState, StepFacts, advance
from vllm_tt_plugin.reloads import Reloads

FLAGS = st.booleans()
STEPS = st.one_of(
    st.just(("prefill",)),
    st.tuples(st.just("idle"), FLAGS),
    st.tuples(st.just("decode"), FLAGS, st.sampled_from([False, False, True]), FLAGS, FLAGS),
)


@given(traced=FLAGS, async_supported=FLAGS, steps=st.lists(STEPS, max_size=12))
def test_each_step_gets_what_the_rules_say(
    traced: bool, async_supported: bool, steps: list[tuple[str, bool, bool, bool, bool]]
) -> None:
    """A decode that the adapter refuses leaves the state as it was."""
    reloads, state = Reloads(traced, async_supported), ReloadState()
    for kind, *said in steps:
        if kind == "prefill":
            reloads.prefill()
            state, _ = advance(state, StepFacts(Phase.PREFILL))
        elif kind == "idle":
            reloads.idle(*said)
            state, _ = advance(state, StepFacts(None, rows_changed=said[0]))
        else:
            on_device, rows_changed, blocks_changed, taken = said
            facts = StepFacts(
                Phase.DECODE,
                on_device,
                rows_changed,
                blocks_changed,
                traced=traced,
                async_supported=async_supported,
            )
            after, commands = advance(state, facts)
            assert reloads.decode(on_device, rows_changed, blocks_changed) == commands
            if taken:
                reloads.submitted()
                state = after
