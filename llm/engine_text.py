"""A request's text as it comes: whole characters, and nothing of a stop string."""

from llm.generating_text import HasTokenBytes, TextStream


class StopStrings:
    """Holds back the end of a text as long as it may be the beginning of a stop string."""

    def __init__(self, stop: tuple[str, ...]):
        self.stop = stop
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What may be shown of the text so far; after `found` nothing more."""
        self.held += text
        begins = [at for at in (self.held.find(stop) for stop in self.stop) if at >= 0]
        if begins:
            shown, self.held, self.found = self.held[: min(begins)], "", True
            return shown
        keep = max((overlap(self.held, stop) for stop in self.stop), default=0)
        shown = self.held[: len(self.held) - keep]
        self.held = self.held[len(self.held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        shown, self.held = self.held, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, less than all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class RequestText:
    """Token ids to text that is safe to show; without a tokenizer there is none."""

    def __init__(self, tokenizer: HasTokenBytes | None, stop: tuple[str, ...]):
        self.stream = None if tokenizer is None else TextStream(tokenizer)
        self.stops = StopStrings(stop)

    def push(self, token_id: int) -> str:
        return "" if self.stream is None else self.stops.push(self.stream.push(token_id))

    @property
    def stopped(self) -> bool:
        return self.stops.found

    def finish(self) -> str:
        """The rest, half characters replaced; a stop string may still end it."""
        if self.stream is None or self.stopped:
            return ""
        shown = self.stops.push(self.stream.finish())
        return shown if self.stopped else shown + self.stops.finish()
