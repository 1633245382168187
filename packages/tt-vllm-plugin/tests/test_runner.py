"""The runner on a model whose next token is a hash of its whole context, driven by hand-written plans.

Whatever arrives, ends, is cut into chunks or preempted, every request must get the tokens of that hash. The
model reads contexts back through page tables, keeps its inputs on the device as the reload commands allow,
and gives NaN for rows that hold nobody.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tt_registry import Capabilities
from tt_scheduler import Phase
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm_tt_plugin.adapter import Adapter
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.device_sampling import DeviceSampler
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.host_sampling import HostSampler
from vllm_tt_plugin.images import Inputs
from vllm_tt_plugin.kv_cache import LayerCache
from vllm_tt_plugin.mesh import HostMesh
from vllm_tt_plugin.requests import RequestTable
from vllm_tt_plugin.runner import TTRunner

from .plans import BLOCK, Planner, Told, greedy
from .strict_adapters import Grouped, HostSampled, Language, Seeing, Version0, Version1, next_token

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROWS, NUM_BLOCKS = 4, 90


class Rig:
    """A planner on one side, a runner with its adapter on the other.

    With ``overlap`` it does as vLLM's engine does with async scheduling: the output of a step is asked for
    when the next step was submitted.
    """

    def __init__(
        self, vllm_config: "VllmConfig", cls: type[Language], v2: bool, overlap: bool = False, **tt: Any
    ) -> None:
        config = TTConfig.parse(tt)
        capabilities = Capabilities.from_class(cls)
        layers = LAYERS if capabilities.hybrid_kv_cache_groups else LAYERS[:1]
        adapter = Adapter(cls(), capabilities, HostMesh.open((1, 1)), config, max_rows=ROWS, lanes=1)
        adapter.inputs = Inputs(images=issubclass(cls, Seeing), rope_deltas=issubclass(cls, Seeing))
        adapter.allocate(layers, page_table_width=20)
        self.planner = Planner(ROWS, NUM_BLOCKS, v2, adapter.page_tables.groups)
        adapter.decode_sizes = (1, 2)
        self.model: Any = adapter.model
        device = DeviceSampler.of(config, capabilities)
        host = HostSampler(vllm_config)
        requests = RequestTable(ROWS, adapter.page_tables.groups)
        self.runner = TTRunner(adapter, requests, host, device, overlap)
        self._depth = 2 if overlap else 1
        self._asked_later: deque[tuple[Any, dict[str, list[int]]]] = deque()

    def step(self, phase: Phase, work: list[tuple[Told, int]]) -> None:
        """Run a step; its tokens must be those of the hash."""
        output = self.runner.execute(self.planner.step(phase, work)) or self.runner.sample(None)
        expected = {r.name: [] if r.missing else [next_token(r.tokens, r.delta)] for r, _ in work}
        for request, _ in work:
            request.output += expected[request.name]
        self._asked_later.append((output, expected))
        self.settle(self._depth - 1)

    def settle(self, left: int = 0) -> None:
        """Ask for outputs until so many are left."""
        while len(self._asked_later) > left:
            output, expected = self._asked_later.popleft()
            if isinstance(output, AsyncModelRunnerOutput):
                output = output.get_output()
            got = {name: output.sampled_token_ids[index] for name, index in output.req_id_to_index.items()}
            assert got == expected


LAYERS = [
    LayerCache((NUM_BLOCKS, 1, BLOCK, 1), torch.bfloat16, tensor_index=index, group=group)
    for index, group in ((0, 0), (0, 1), (1, 1))
]
ROUTES = {
    "host": (HostSampled, {}),
    "device, version 0": (Version0, {"sample_on_device_mode": "all"}),
    "device, version 1": (Version1, {"sample_on_device_mode": "all"}),
    "decode only, version 1": (Version1, {"sample_on_device_mode": "decode_only"}),
    "several KV cache groups": (Grouped, {"sample_on_device_mode": "decode_only"}),
    "images": (Seeing, {"sample_on_device_mode": "all"}),
    "no traces, version 1": (Version1, {"sample_on_device_mode": "all", "trace_mode": "none"}),
    "asked for the host, version 0": (Version0, {}),
    "asked for the host, version 1": (Version1, {}),
}


ASYNC_ONLY = ("several KV cache groups", "images")
"""What they add is all there when steps overlap; engines serve them in the other ways too."""


class Streams(RuleBasedStateMachine):
    """Requests that arrive, prefill in chunks, decode, are preempted and end. Subclasses say on what rig."""

    def make_rig(self, v2: bool) -> Rig:
        raise NotImplementedError

    @initialize(v2=st.booleans())
    def start(self, v2: bool) -> None:
        self.rig = self.make_rig(v2)
        self.requests: list[Told] = []
        self.arrived = 0

    @rule(length=st.integers(1, 9), on_host=st.booleans(), seen=st.integers(0, 3))
    def arrive(self, length: int, on_host: bool, seen: int) -> None:
        """A bias on no token that the hash gives changes nothing but the route."""
        if len(self.requests) < 6:
            self.arrived += 1
            prompt = [(self.arrived * 7 + i) % 60 for i in range(length)]
            places = range(min(seen, length) if isinstance(self.rig.model, Seeing) else 0)
            images = [(place, place + 1, 10 * self.arrived + place) for place in places]
            params = biased() if on_host else greedy()
            self.requests.append(Told(f"r{self.arrived}", prompt, params, images))

    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        waiting = [r for r in self.requests if r.row is None][: ROWS - len(self.rig.planner.rows.owned)]
        chunked = [r for r in self.requests if r.row is not None and r.missing > 1]
        if not waiting + chunked:
            return
        chosen = data.draw(st.lists(st.sampled_from(waiting + chunked), unique=True, min_size=1))
        self.rig.step(Phase.PREFILL, [(r, data.draw(st.integers(1, r.missing))) for r in chosen])

    @rule(steps=st.integers(1, 6))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            decoding = [r for r in self.requests if r.output and r.row is not None and r.missing == 1]
            if decoding and all(len(r.tokens) < 70 for r in decoding):
                self.rig.step(Phase.DECODE, [(r, 1) for r in decoding])

    @precondition(lambda self: self.rig.planner.rows.owned)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        held = [r for r in self.requests if r.row is not None]
        for request in data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1)):
            self.rig.planner.preempt(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.rig.planner.finish(request)

    @rule()
    def idle(self) -> None:
        self.rig.step(Phase.EMPTY, [])

    @rule()
    def ask(self) -> None:
        self.rig.settle()

    def teardown(self) -> None:
        self.rig.settle()


def machine(
    vllm_config: "VllmConfig", cls: type[Language], tt: dict[str, Any], overlap: bool
) -> type[RuleBasedStateMachine]:
    class OnRig(Streams):
        def make_rig(self, v2: bool) -> Rig:
            return Rig(vllm_config, cls, v2, overlap, **tt)

    return OnRig


def biased() -> SamplingParams:
    return greedy(logit_bias={0: -1e-6})


@pytest.mark.parametrize(
    ("route", "overlap"),
    [(route, overlap) for route in ROUTES for overlap in (False, True) if overlap or route not in ASYNC_ONLY],
)
def test_every_stream_is_that_of_its_context(vllm_config: "VllmConfig", route: str, overlap: bool) -> None:
    cls, tt = ROUTES[route]
    case = machine(vllm_config, cls, tt, overlap).TestCase
    case.settings = settings(max_examples=15, stateful_step_count=25, deadline=None, print_blob=True)
    case().runTest()


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_all_preempted_at_once_and_resumed_in_the_same_order(vllm_config: "VllmConfig", v2: bool) -> None:
    """As a reset of the prefix cache does: the next decode names the same requests, at new positions."""
    rig = Rig(vllm_config, Version1, v2, sample_on_device_mode="all")
    requests = [Told("a", [1, 2, 3], greedy()), Told("b", [4, 5], greedy())]
    rig.step(Phase.PREFILL, [(r, r.missing) for r in requests])
    rig.step(Phase.DECODE, [(r, 1) for r in requests])
    for request in requests:
        rig.planner.preempt(request)
    rig.step(Phase.PREFILL, [(r, r.missing) for r in requests])
    for _ in range(2 * BLOCK):
        rig.step(Phase.DECODE, [(r, 1) for r in requests])


def test_a_steady_decode_reloads_only_pages(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, Version1, False, sample_on_device_mode="all")
    request = Told("a", [1, 2, 3], greedy())
    rig.step(Phase.PREFILL, [(request, 3)])
    for _ in range(6):
        rig.step(Phase.DECODE, [(request, 1)])
    decodes = [kwargs for name, _, kwargs in rig.model.calls if name == "decode_forward"]
    assert [d["reload_inputs"] for d in decodes] == [True] + 5 * [False]
    assert [d["reload_page_table"] for d in decodes] == [False, True, False, False, False, True]
    assert {len(d["tokens"]) for d in decodes} == {1}, "the smallest listed size"


def test_each_layer_is_given_the_table_of_its_group(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, Grouped, False)
    gone, stays = Told("a", [1, 2, 3], greedy()), Told("b", [4, 5], greedy())
    rig.step(Phase.PREFILL, [(gone, 3), (stays, 2)])
    rig.planner.finish(gone)
    rig.step(Phase.DECODE, [(stays, 1)])
    prefill, decode = ([t.tolist() for t in kw["page_tables_per_layer"]] for _, _, kw in rig.model.calls[:2])
    rows = [[*stays.blocks[group], *19 * [0]] for group in (0, 1, 1)]
    assert [table[1] for table in prefill] == rows
    assert [table[2:] for table in prefill] == 3 * [2 * [20 * [0]]]
    assert decode == [[20 * [0], row, 20 * [0], 20 * [0]] for row in rows]


def test_decodes_are_told_how_far_rope_is_off_when_rows_change(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, Seeing, False, overlap=True, sample_on_device_mode="all")
    plain, seeing = Told("a", [1, 2], greedy()), Told("b", [3, 4, 5], greedy(), [(1, 2, 30), (2, 3, 4)])
    late = Told("c", [6, 7], greedy(), [(1, 2, 8)])
    rig.step(Phase.PREFILL, [(plain, 2), (seeing, 2)])
    rig.step(Phase.PREFILL, [(seeing, 1)])
    for _ in range(2):
        rig.step(Phase.DECODE, [(plain, 1), (seeing, 1)])
    rig.step(Phase.PREFILL, [(late, 1)])
    rig.step(Phase.DECODE, [(plain, 1), (seeing, 1)])
    rig.step(Phase.PREFILL, [(late, 1)])
    rig.planner.preempt(plain)
    rig.step(Phase.DECODE, [(seeing, 1), (late, 1)])
    rig.planner.preempt(seeing)
    rig.step(Phase.PREFILL, [(seeing, seeing.missing)])
    rig.settle()
    calls = rig.model.calls
    told = [kw["rope_deltas_all_users"] for name, _, kw in calls if name == "decode_forward"]
    assert told == [[0, 34], None, [0, 34], [0, 34, 8]]
    seen = [kw["pixel_values"] for name, _, kw in calls if name == "prefill_forward"]
    assert seen == [[None, [30]], [[30, 4]], [None], [[8]], [[30, 4]]]


def reads(rig: Rig) -> list[str]:
    """Which decodes were submitted and read, in order."""
    names = {"decode_forward": "submit", "process_decode_output_host": "read"}
    return [names[name] for name, _, _ in rig.model.calls if name in names]


def test_a_steady_decode_is_submitted_before_the_one_in_flight_is_read(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, Version1, False, overlap=True, sample_on_device_mode="all")
    request = Told("a", [1, 2, 3], greedy())
    rig.step(Phase.PREFILL, [(request, 3)])
    for _ in range(3):
        rig.step(Phase.DECODE, [(request, 1)])
    assert reads(rig) == ["submit", "submit", "read", "submit", "read"]
    rig.runner.drain()
    assert reads(rig)[5:] == ["read"]
    rig.settle()
    assert len(reads(rig)) == 6, "each is read once"


@pytest.mark.parametrize("change", ["arrival", "end", "preemption", "one left out"])
def test_a_change_of_rows_reads_what_is_in_flight_first(vllm_config: "VllmConfig", change: str) -> None:
    rig = Rig(vllm_config, Version1, False, overlap=True, sample_on_device_mode="all")
    stays, goes = Told("a", [1, 2], greedy()), Told("b", [3, 4, 5], greedy())
    rig.step(Phase.PREFILL, [(stays, 2), (goes, 3)])
    for _ in range(2):
        rig.step(Phase.DECODE, [(stays, 1), (goes, 1)])
    assert reads(rig) == ["submit", "submit", "read"]
    if change == "arrival":
        rig.step(Phase.PREFILL, [(Told("c", [6], greedy()), 1)])
        assert reads(rig)[3:] == ["read"]
        return
    if change == "end":
        rig.planner.finish(goes)
    elif change == "preemption":
        rig.planner.preempt(goes)
    rig.step(Phase.DECODE, [(stays, 1)])
    assert reads(rig)[3:] == ["read", "submit"]


def test_an_idle_step_that_moves_nobody_costs_no_reload(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, Version1, False, sample_on_device_mode="all")
    stays, leaves = Told("a", [1, 2], greedy()), Told("b", [3, 4, 5], greedy())
    rig.step(Phase.PREFILL, [(stays, 2), (leaves, 3)])
    rig.step(Phase.DECODE, [(stays, 1), (leaves, 1)])
    rig.step(Phase.EMPTY, [])
    rig.step(Phase.DECODE, [(stays, 1), (leaves, 1)])
    rig.planner.finish(leaves)
    rig.step(Phase.EMPTY, [])
    rig.step(Phase.DECODE, [(stays, 1)])
    decodes = [kwargs for name, _, kwargs in rig.model.calls if name == "decode_forward"]
    assert [d["reload_inputs"] for d in decodes] == [True, False, True]


def test_logprobs_of_a_prefill_belong_to_the_requests_that_got_a_token(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, HostSampled, False)
    chunked, whole = Told("a", [1, 2, 3], greedy()), Told("b", [4, 5], greedy(logprobs=2))
    assert rig.runner.execute(rig.planner.step(Phase.PREFILL, [(chunked, 2), (whole, 2)])) is None
    output = rig.runner.sample(None)
    assert isinstance(output, ModelRunnerOutput)
    assert output.req_ids == ["b", "a"]
    assert output.sampled_token_ids == [[next_token([4, 5])], []]
    assert output.logprobs is not None
    assert output.logprobs.logprob_token_ids.shape == (1, 3)
    assert output.logprobs.logprob_token_ids[0, 0] == next_token([4, 5])


def test_logprobs_of_a_decode_skip_free_rows(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, HostSampled, False)
    gone, stays = Told("a", [1, 2, 3], greedy()), Told("b", [4, 5], greedy(logprobs=1))
    rig.step(Phase.PREFILL, [(gone, 3), (stays, 2)])
    rig.planner.finish(gone)
    assert rig.runner.execute(rig.planner.step(Phase.DECODE, [(stays, 1)])) is None
    output = rig.runner.sample(None)
    assert isinstance(output, ModelRunnerOutput)
    assert output.req_ids == ["b"]
    assert output.logprobs is not None
    assert output.logprobs.logprob_token_ids[:, 0].tolist() == [next_token(stays.tokens)]


def test_a_decode_in_a_prefill_step_is_refused(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, HostSampled, False)
    request = Told("a", [1, 2], greedy())
    rig.step(Phase.PREFILL, [(request, 2)])
    with pytest.raises(StepError, match="'a' decodes, yet stands in a prefill step"):
        rig.runner.execute(rig.planner.step(Phase.PREFILL, [(request, 1)]))


def test_nothing_waits_to_be_sampled(vllm_config: "VllmConfig") -> None:
    rig = Rig(vllm_config, HostSampled, False)
    with pytest.raises(StepError, match="none waits"):
        rig.runner.sample(None)
