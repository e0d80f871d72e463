"""A document that is not text yet: the bytes of a page or a PDF, on their way to html_process or pdf_process.

Only sources make them and only those two stages take them: what is written to disk is always a plain Document.
"""

from dataclasses import dataclass

from data_processing.document import Document

KINDS = ("html", "pdf")


@dataclass(slots=True)
class RawDocument(Document):
    """`raw` holds the bytes, `kind` says which stage reads them, `declared` is the encoding that HTTP named."""

    raw: bytes = b""
    kind: str = "html"
    declared: str = ""

    def with_text(self, text: str, title: str = "", **meta) -> Document:
        """The plain document that a stage makes of it."""
        return Document(self.id, self.source, text, title or self.title, self.url, self.date, self.meta | meta)


def text_bytes(document: Document) -> int:
    """UTF-8 bytes of the text, or the bytes that are still to become text."""
    if isinstance(document, RawDocument):
        return len(document.raw)
    text = document.text
    return len(text) if text.isascii() else len(text.encode("utf-8"))
