"""Hugging Face `datasets` as a source: streamed from the hub, or a directory made by save_to_disk or of parquet files.

Streaming means that FineWeb-Edu's terabytes cost only what is read before the budget ends
(`source=hf path=HuggingFaceFW/fineweb-edu hf_config=sample-10BT max_tokens=100000000`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import UserError, missing_extra
from data_processing.document import Document
from data_processing.quarantine import Quarantine
from data_processing.sources_rows import RowFields, document_from_row

SAVED_DATASET, SAVED_DICT = "state.json", "dataset_dict.json"  # what save_to_disk leaves in a directory


def import_datasets():
    """The package, or the UserError that names the install command."""
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "data") from error
    return datasets


@dataclass
class HfSource:
    """Rows of one split as documents; `path` is a name on the hub or a local directory."""

    path: str
    config: str
    split: str
    row_fields: RowFields
    counts: Counter = field(default_factory=Counter)
    total_bytes: int | None = None
    quarantine: Quarantine = field(init=False)

    def __post_init__(self):
        self.quarantine = Quarantine(self.counts)

    def identity(self) -> dict[str, Any]:
        return {"path": self.path, "config": self.config, "split": self.split}

    def documents(self) -> Iterator[Document]:
        for index, row in enumerate(self._open()):
            plain = {key: value for key, value in row.items() if isinstance(value, str | int | float | bool | dict)}
            where = f"{self.path}:{self.split}:{index}"
            yield document_from_row(plain, self.row_fields, where, default_id=where)

    def _open(self):
        """An iterable dataset; whatever the library finds wrong with the names is one line for the user."""
        datasets = import_datasets()
        directory = Path(self.path).expanduser()
        try:
            if (directory / SAVED_DATASET).exists():
                return datasets.load_from_disk(str(directory))
            if (directory / SAVED_DICT).exists():
                return datasets.load_from_disk(str(directory))[self.split]
            name = str(directory) if directory.exists() else self.path
            return datasets.load_dataset(name, self.config or None, split=self.split, streaming=True)
        except (ValueError, KeyError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"path={self.path!r} hf_config={self.config!r} hf_split={self.split!r} cannot be opened ({reason});"
                " check the three, and the network"
            ) from error
