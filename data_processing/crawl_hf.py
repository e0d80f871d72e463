"""Rows of a data set on the Hugging Face hub (FineWeb-Edu), read from its parquet files by ranges of bytes.

`build_corpus source=hf` streams the same rows but begins anew after a kill. Here each row group is committed, a resumed
run asks for none twice, and no file of gigabytes is downloaded for the first thousand rows: pyarrow reads the footer,
then the column chunks that are wanted.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from configs.errors import UserError, missing_extra
from data_processing.crawl_api import (
    API_GATE,
    ApiAddress,
    ApiContext,
    Batch,
    dig,
    dig_text,
    fetch_api,
    listing_failed,
    parse_json,
)
from data_processing.crawl_fetch import Fetcher, Gate
from data_processing.crawl_page import FetchError
from data_processing.crawl_state import KEPT, Item, Outcome
from data_processing.crawl_url import normalise_url
from data_processing.sources_rows import RowFields, document_from_row

PLAIN = (str, int, float, bool, dict)
CHUNK_BYTES = 4_000_000  # asked for at once when pyarrow wants less


@dataclass
class HubConfig:
    """Which rows; the defaults are FineWeb-Edu's sample of ten billion tokens."""

    dataset: str = "HuggingFaceFW/fineweb-edu"
    config: str = "sample-10BT"
    split: str = "train"
    text_key: str = "text"
    id_key: str = "id"
    columns: list[str] = field(default_factory=lambda: ["text", "id", "url", "date", "language", "score"])  # if there
    list_url: str = "https://datasets-server.huggingface.co"
    file_hosts: list[str] = field(default_factory=lambda: ["huggingface.co", "*.huggingface.co", "*.hf.co"])


@dataclass
class HubSource:
    """Row groups in the order of the files, one a batch. Bookmark: file, row group."""

    config: HubConfig
    name: str = "hub"

    def __post_init__(self):
        self.api = ApiAddress(self.config.list_url)

    def hosts(self) -> list[str]:
        return [self.api.host, *self.config.file_hosts]

    def batches(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise missing_extra("pyarrow", "data") from error
        mark = bookmark or {"file": 0, "group": 0}
        files = self._files(context)
        while mark["file"] < len(files):
            url, size = files[mark["file"]]
            try:
                table = parquet.ParquetFile(RangeFile(url, size, context.fetcher))
                names = [name for name in self.config.columns if name in table.schema_arrow.names]
                for group in range(mark["group"], table.num_row_groups):
                    rows = table.read_row_group(group, columns=names).to_pylist()
                    yield Batch([self._outcome(mark["file"], group, rows)], {"file": mark["file"], "group": group + 1})
            except FetchError as error:
                raise listing_failed(self.name, error) from error
            except (OSError, ArrowException) as error:
                raise UserError(f"{url} is no whole parquet file ({error}); try again later") from error
            mark = {"file": mark["file"] + 1, "group": 0}
            yield Batch([], mark)

    def _files(self, context: ApiContext) -> list[tuple[str, int]]:
        """(URL, bytes) of the parquet files of the config and split. Raises UserError when there are none."""
        config = self.config
        try:
            answer = parse_json(fetch_api(context.fetcher, self.api, "parquet", {"dataset": config.dataset}, API_GATE))
        except FetchError as error:
            raise listing_failed(self.name, error) from error
        files = [file for file in dig(answer, "parquet_files") or [] if isinstance(file, dict)]
        wanted = [f for f in files if (f.get("config"), f.get("split")) == (config.config, config.split)]
        found = [(normalise_url(dig_text(file, "url"), drop_parameters=()), dig(file, "size")) for file in wanted]
        if not found or not all(url and isinstance(size, int) for url, size in found):
            names = sorted({f"{file.get('config')}/{file.get('split')}" for file in files})
            raise UserError(
                f"hub.config={config.config!r} hub.split={config.split!r}: {config.dataset} has no such parquet files;"
                f" it has {', '.join(names) or 'none at all'}"
            )
        return found

    def _outcome(self, file: int, group: int, rows: list[dict[str, Any]]) -> Outcome:
        """A row group as one item, whose documents are its rows with text."""
        config = self.config
        item = Item(f"{config.dataset}:{config.config}:{config.split}:{file}:{group}", self.name)
        names = RowFields(config.text_key, config.id_key, config.dataset, self.name)
        documents = []
        for index, row in enumerate(rows):
            if config.text_key not in row:
                raise UserError(f"hub.text_key={config.text_key!r} is no column that is read; see hub.columns")
            plain = {name: value for name, value in row.items() if isinstance(value, PLAIN)}
            if plain.get(config.text_key):
                where = f"{item.key}:{index}"
                documents.append(document_from_row(plain, names, where, default_id=where))
        return Outcome(item, KEPT, f"{len(documents)} of {len(rows)} rows", documents)


class RangeFile(io.RawIOBase):
    """A file on the network that can be read anywhere: each read asks for its bytes, a few more at small ones."""

    def __init__(self, url: str, size: int, fetcher: Fetcher):
        self.url, self.size, self.fetcher = url, size, fetcher
        self.position = 0
        self._start, self._buffer = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = max(0, base + offset)
        return self.position

    def read(self, size: int = -1) -> bytes:
        last = self.size if size < 0 else min(self.size, self.position + size)
        if last <= self.position:
            return b""
        if not (self._start <= self.position and last <= self._start + len(self._buffer)):
            self._fill(self.position, last)
        begin = self.position - self._start
        data = self._buffer[begin : begin + last - self.position]
        self.position += len(data)
        return data

    def _fill(self, first: int, last: int) -> None:
        """Ask for [first, last) at least; near the end of the file for its last chunk, where the footer lies."""
        first = min(first, max(0, self.size - CHUNK_BYTES)) if last == self.size else first
        last = min(self.size, max(last, first + CHUNK_BYTES))
        gate = Gate(obey_robots=False, max_bytes=last - first, byte_range=(first, last - 1))
        body = self.fetcher.follow(self.url, gate).body
        if len(body) != last - first:
            raise FetchError("short_range", f"{self.url}: {len(body)} bytes instead of {last - first}")
        self._start, self._buffer = first, body
