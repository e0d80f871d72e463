"""HTML pages and PDFs in directories: one raw document a file, to be read by html_process or pdf_process."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data_processing.document import Document, open_bytes
from data_processing.quarantine import Quarantine
from data_processing.raw_document import RawDocument
from data_processing.sources_files import describe_files, plain_bytes, relative_names

HTML_SUFFIXES = tuple(kind + packed for kind in (".html", ".htm", ".xhtml") for packed in ("", ".gz", ".zst"))
FOLDER = "{folder}"  # in source_name: the first folder below the common one, so that sources can be told apart
PDF_SUFFIXES = (".pdf", ".pdf.gz")


@dataclass
class RawFileSource:
    """Files of one kind (html or pdf); a compressed file that is cut off goes to the quarantine."""

    files: list[Path]
    kind: str
    source_name: str
    counts: Counter = field(default_factory=Counter)
    quarantine: Quarantine = field(init=False)

    def __post_init__(self):
        self.quarantine = Quarantine(self.counts)

    @property
    def total_bytes(self) -> int | None:
        return plain_bytes(self.files)

    def identity(self) -> dict[str, Any]:
        return describe_files(self.files)

    def documents(self) -> Iterator[Document]:
        for path, name in zip(self.files, relative_names(self.files), strict=True):
            try:
                with open_bytes(path) as file:
                    data = file.read()
            except UserError as error:
                self.quarantine.add(str(path), "unreadable_file", str(error))
                continue
            source = self.source_name.replace(FOLDER, name.split("/")[0] if "/" in name else self.kind)
            yield RawDocument(name, source, "", raw=data, kind=self.kind)
