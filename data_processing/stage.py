"""What a stage of build_corpus is: a block of documents in, the kept and the dropped ones out, in order.

A stage whose verdict hangs on earlier documents (deduplicate) also keeps a journal: what the last block added to its
memory, as bytes. The driver commits the journal with the block and hands it back after a kill, so that a resumed run
knows what the dead one knew. A stage without memory runs in worker processes, one with memory where the blocks meet
in their order; both can count what they did besides dropping (`take_counts`).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from data_processing.document import Document


@dataclass(slots=True)
class Dropped:
    """A document that a stage refused: `reason` names the rule (it is counted), `detail` holds this case's value."""

    document: Document
    reason: str
    detail: str = ""


class Stage(Protocol):
    """One step of the pipeline; it may change the documents it keeps."""

    name: str
    has_memory: bool

    def run(self, block: list[Document]) -> tuple[list[Document], list[Dropped]]:
        """Split a block into what goes on and what is dropped; together they are the block, each in its order."""

    def take_counts(self) -> Counter:
        """What was counted since the last call besides documents (masked addresses, lines taken out)."""

    def take_journal(self) -> bytes:
        """What the blocks since the last call added to the stage's memory; b"" for a stage without memory."""

    def replay_journal(self, journal: bytes) -> None:
        """Restore what `take_journal` gave, block after block, before the first `run` of a resumed build."""


class MappingStage:
    """The base of stages that look at one document at a time and may put another in its place: `convert`."""

    name = ""
    has_memory = False

    def convert(self, document: Document) -> tuple[Document, str, str]:
        """(document to go on with, reason, detail); an empty reason keeps it."""
        raise NotImplementedError

    def run(self, block: list[Document]) -> tuple[list[Document], list[Dropped]]:
        kept, dropped = [], []
        for document in block:
            converted, reason, detail = self.convert(document)
            if reason:
                dropped.append(Dropped(converted, reason, detail))
            else:
                kept.append(converted)
        return kept, dropped

    def take_counts(self) -> Counter:
        return Counter()

    def take_journal(self) -> bytes:
        return b""

    def replay_journal(self, journal: bytes) -> None:
        assert not journal, f"{self.name} keeps no memory, got a journal of {len(journal)} bytes instead of 0"


class StatelessStage(MappingStage):
    """The base of stages that judge a document and perhaps change it in place: they only write `judge`."""

    def judge(self, document: Document) -> tuple[str, str]:
        """(reason, detail) of a document to drop, ("", "") of one to keep (and perhaps changed in place)."""
        raise NotImplementedError

    def convert(self, document: Document) -> tuple[Document, str, str]:
        return (document, *self.judge(document))
