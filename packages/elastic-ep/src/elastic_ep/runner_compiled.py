"""Programs compiled for the CPU by `torch.compile`, over static tensors.

Importing it imports torch's compiler, which takes seconds: name it, or ``elastic_ep.runner_compiled:warm``,
to a `elastic_ep.Launcher`, and its processes start with that done.
"""

from types import FunctionType

import torch
import torch._dynamo
import torch._inductor.config

from elastic_ep.runner import EagerRunner, Program, Static


class CompiledRunner(EagerRunner):
    """Compiles at capture, for exactly the static tensors' shapes, and never again by itself.

    ``in_place`` false is the way of runners whose programs do not outlive a change of the group: each commit
    then captures anew.
    """

    reruns = False

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place

    def _record(self, program: Program) -> Program:
        compiled = torch.compile(_of_its_own(program), fullgraph=True, dynamic=False)
        static = dict(self._static)
        with torch.no_grad():
            compiled(static)

        def replay(_: Static) -> None:
            with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
                compiled(static)

        return replay


def warm() -> None:
    """Compile a trifle, so that what the compiler imports on first use is there."""
    torch._inductor.config.compile_threads = 1

    def trifle(static: Static) -> None:
        static["x"].add_(1)

    CompiledRunner().capture(trifle, {"x": torch.zeros(4)})
    torch._dynamo.reset()


def _of_its_own(program: Program) -> Program:
    """The same function with a code object of its own, since the compiler keeps what it made by code object,
    and only a few for each."""
    if not isinstance(program, FunctionType):
        return program
    copy = FunctionType(
        program.__code__.replace(),
        program.__globals__,
        program.__name__,
        program.__defaults__,
        program.__closure__,
    )
    copy.__kwdefaults__ = program.__kwdefaults__
    return copy
