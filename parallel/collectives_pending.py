"""A collective under way: started by collectives.start_*, finished by `.wait()`, which returns its result.

On a GPU it runs on a side stream of ours, as a synchronous call there: wait() makes the current stream wait for its end
event, and never the host. On a CPU a thread of gloo runs it. Either way tensors stay referenced until wait().
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel.collectives_log import Call, cuda_events
from parallel.mesh import Mesh


class Pending:
    """`wait()` gives the result, once or more often; `is_done` says whether it has been waited for."""

    def __init__(self, result: Any, mesh: Mesh | None = None, call: Call | None = None):
        self.result, self.mesh, self.call = result, mesh, call
        self.held: Any = None  # what must live until the transfer is over

    @property
    def is_done(self) -> bool:
        return self.call is None

    def wait(self) -> Any:
        """The result, which the current stream may use from here on."""
        if self.call is None:
            return self.result
        call, self.call = self.call, None
        if call.events is not None:
            exposed = cuda_events()
            stream = torch.cuda.current_stream(self.mesh.device)
            exposed[0].record(stream)
            stream.wait_event(call.events[1])
            exposed[1].record(stream)
        else:
            began = time.perf_counter()
            with self.mesh.log.failures(call):
                for work in call.works:
                    work.wait()
            exposed = time.perf_counter() - began
        self.mesh.log.leave(call, exposed)
        self.held = None
        call.works = []
        return self.result


def wait_all(pendings: list[Pending]) -> list[Any]:
    """The results of several; on a GPU the whole wait counts as exposed once, under the last one's kind."""
    if not pendings or pendings[0].call is None or pendings[0].call.events is None:
        return [pending.wait() for pending in pendings]
    stream = torch.cuda.current_stream(pendings[0].mesh.device)
    exposed = cuda_events()
    exposed[0].record(stream)
    for pending in pendings:
        stream.wait_event(pending.call.events[1])
    exposed[1].record(stream)
    nothing = (exposed[1], exposed[1])
    for pending in pendings:
        call, pending.call, pending.held = pending.call, None, None
        pending.mesh.log.leave(call, exposed if pending is pendings[-1] else nothing)
    return [pending.result for pending in pendings]


def start(
    run: Callable[[bool], Any],
    result: Any,
    mesh: Mesh,
    what: tuple[str, str, list[Tensor]],
    stream: str = "collectives",
) -> Pending:
    """Begin a collective: `run(async_op)` issues it and returns its work; `what` is (op, axis, payload).

    `stream` names the side stream on a GPU: calls on one stream run in order, calls on two may overlap.
    """
    op, axis, payload = what
    size = mesh.size(axis)
    if payload[0].is_cuda:
        side = mesh.stream(stream)
        side.wait_stream(torch.cuda.current_stream(mesh.device))
        with torch.cuda.stream(side):
            call = mesh.log.enter(op, axis, size, *payload)
            with mesh.log.failures(call):
                run(False)
            call.issued()
        return Pending(result, mesh, call)
    call = mesh.log.enter(op, axis, size, *payload)
    with mesh.log.failures(call):
        works = run(True)
    call.works = works if isinstance(works, list) else [works]
    note_end(call.works[-1], call)
    return Pending(result, mesh, call)


def note_end(work: Any, call: Call) -> None:
    """Let the backend's thread write down when the transfer ended, so that hidden time is not counted as longer."""

    def finished(_: Any) -> None:
        call.finished_s = time.perf_counter()

    try:
        future = work.get_future()
    except RuntimeError:  # gloo's reduce_scatter has none: there the end is the end of wait()
        return
    future.add_done_callback(finished)
