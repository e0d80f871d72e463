"""Parquet files as a source: rows in batches, so that memory is that of one row group."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import UserError, missing_extra
from data_processing.document import Document
from data_processing.quarantine import Quarantine
from data_processing.sources_files import describe_files, plain_bytes, relative_names
from data_processing.sources_rows import RowFields, document_or_refusal

PARQUET_SUFFIXES = (".parquet",)
BATCH_ROWS = 512


def import_parquet():
    """pyarrow.parquet, or the UserError that names the install command."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "data") from error
    return parquet


@dataclass
class ParquetSource:
    """Rows with a text column; columns of other kinds than text and numbers are left out."""

    files: list[Path]
    row_fields: RowFields
    counts: Counter = field(default_factory=Counter)
    quarantine: Quarantine = field(init=False)

    def __post_init__(self):
        self.quarantine = Quarantine(self.counts)

    @property
    def total_bytes(self) -> int | None:
        return plain_bytes(self.files)

    def identity(self) -> dict[str, Any]:
        return describe_files(self.files) | {"row_fields": [self.row_fields.text_key, self.row_fields.id_key]}

    def documents(self) -> Iterator[Document]:
        any_yet = False
        for path, name in zip(self.files, relative_names(self.files), strict=True):
            for number, row in enumerate(self._rows(path)):
                plain = {key: value for key, value in row.items() if isinstance(value, str | int | float | bool | dict)}
                where, row_id = f"{path}:{number}", f"{name}:{number}"
                document = document_or_refusal(plain, self.row_fields, (where, row_id), self.quarantine, not any_yet)
                if document is not None:
                    any_yet = True
                    yield document

    @staticmethod
    def _rows(path: Path) -> Iterator[dict[str, Any]]:
        parquet = import_parquet()
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    yield from batch.to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
            raise UserError(f"{path} is not readable parquet ({str(error)[:200]}); fetch or write it again") from error
