"""The deduplicate stage: of documents with the same text, the first one stays.

Exact equality by a 128-bit BLAKE2b hash of the text (which normalise has brought to one form): among 10^12 documents
the chance of one false match is 10^-15. Memory is linear, about 250 bytes a kept document, whatever its length.
"""

import hashlib
from collections import Counter

from data_processing.document import Document
from data_processing.stage import Dropped

DIGEST_BYTES = 16


def text_digest(text: str) -> bytes:
    """The 16-byte BLAKE2b hash of a text's UTF-8 bytes."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=DIGEST_BYTES).digest()


class Deduplicate:
    """Drops a document whose text was seen before, and names the id of the one that stays."""

    name = "deduplicate"
    has_memory = True

    def __init__(self):
        self.first_ids: dict[bytes, str] = {}
        self.journal: list[bytes] = []

    def run(self, block: list[Document]) -> tuple[list[Document], list[Dropped]]:
        kept, dropped = [], []
        for document in block:
            digest = text_digest(document.text)
            first = self.first_ids.get(digest)
            if first is None:
                self._remember(digest, document.id)
                kept.append(document)
            else:
                dropped.append(Dropped(document, "exact_duplicate", f"same text as {first}"))
        return kept, dropped

    def _remember(self, digest: bytes, document_id: str) -> None:
        self.first_ids[digest] = document_id
        encoded = document_id.encode("utf-8")
        self.journal.append(digest + len(encoded).to_bytes(4, "little") + encoded)

    def take_counts(self) -> Counter:
        return Counter()

    def take_journal(self) -> bytes:
        taken, self.journal = b"".join(self.journal), []
        return taken

    def replay_journal(self, journal: bytes) -> None:
        at = 0
        while at < len(journal):
            digest = journal[at : at + DIGEST_BYTES]
            start = at + DIGEST_BYTES + 4
            at = start + int.from_bytes(journal[start - 4 : start], "little")
            self.first_ids[digest] = journal[start:at].decode("utf-8")
