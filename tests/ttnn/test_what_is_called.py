"""Every ttnn call that the project makes is made to the real package here, on some mock cluster."""

import ast

from . import test_mesh, test_traces, test_ttnn_llama, test_ttnn_sampler
from .calls import ROOT, by_file, called, uses
from .conftest import Watched

NEVER_MADE = {
    "execute_trace": "replays a trace, for which a mock device has no memory: the process ends by SIGSEGV",
}
BY_NAME = {
    ROOT / "packages/tt-mock/src/tt_mock/ttnn_shadows.py": "looks up what the model asks of its stand-in"
}
"""Files that use ttnn otherwise than by its attributes, so that what they call cannot be read from them."""


def test_every_call_is_made_to_the_real_package(mock: Watched) -> None:
    test_mesh.outcomes(mock, "p150")
    test_mesh.of_a_rank(mock)
    test_ttnn_sampler.outcomes(mock, "t3k")
    test_ttnn_llama.outcomes(mock, "t3k")
    test_ttnn_llama.served(mock)
    test_traces.outcomes(mock)
    assert mock.functions >= called()
    assert mock.functions - mock.made == NEVER_MADE.keys()


def test_calls_are_there_to_be_read() -> None:
    assert {path for path, each in by_file().items() if "" in each.mentioned} == BY_NAME.keys()


def test_every_form_of_use_is_seen() -> None:
    code = """
import ttnn
import ttnn.operations as ops
from ttnn import add as plus
from ttnn.experimental import rotate
def late():
    import ttnn as tt
    tt.a.b(ttnn.MODE.ONE)
    ops.go(plus(1), rotate(2), map(ttnn.exp))
    ttnn.pick(tt).ttnn.no()
    other.ttnn.no()
    give(ttnn)
"""
    found = uses(ast.parse(code))
    assert found.called == {"a.b", "operations.go", "add", "experimental.rotate", "pick"}
    assert found.mentioned - found.called == {"MODE.ONE", "exp", ""}
