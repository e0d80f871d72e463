"""SIGTERM and SIGINT as a request to stop: the step in hand is finished, the run is saved, then the process ends."""

import signal
from types import FrameType, TracebackType


class StopSignals:
    """Inside the block, SIGTERM and SIGINT set `requested` instead of killing; a second one kills as usual."""

    def __init__(self) -> None:
        self.requested: int | None = None  # the signal's number
        self.previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self.previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.requested = number
        self.restore()
