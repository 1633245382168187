"""Programs recorded as CUDA graphs. Written to PyTorch's documentation of `torch.cuda.graph`; it has not run
on a GPU yet. Tested are the refusal of tensors that are on none, and that torch has what is called here."""

import torch

from elastic_ep.errors import RunnerError
from elastic_ep.runner import EagerRunner, Program, Static


class CudaGraphRunner(EagerRunner):
    """A graph replays kernels on fixed addresses, so it outlives every change of the group that only writes
    contents.

    RunnerError at capture if a static tensor is not on a GPU. A program must not wait for the host: no
    branch on a tensor's value, no ``tolist``.
    """

    reruns = False

    def _record(self, program: Program) -> Program:
        elsewhere = sorted(name for name, tensor in self._static.items() if not tensor.is_cuda)
        if elsewhere:
            raise RunnerError(f"{elsewhere} are not on a GPU; make all static tensors there")
        static, aside = self._static, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside), torch.no_grad():
            program(static)  # what libraries set up on first use must not be in the graph
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            program(static)

        def replay(_: Static) -> None:
            graph.replay()

        return replay
