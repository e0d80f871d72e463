"""Parquet files on a hub, read by byte ranges: equal rows, resume by row group, few bytes for few rows."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.errors import UserError
from data_processing.crawl import CrawlConfig, Outside, crawl
from data_processing.crawl_fetch import Fetcher
from data_processing.crawl_hf import HubConfig, RangeFile
from data_processing.document import read_documents
from tests.crawl_server import FakeTime, Reply, WebServer, fetch_config, json_reply, resolver, serve

ROWS, GROUP = 40, 10
NAMES = {"dataset": "Org/data", "config": "sample", "split": "train"}


@pytest.fixture(scope="module")
def running():
    with serve() as server:
        yield server


@pytest.fixture
def web(running) -> WebServer:
    running.routes.clear()
    running.asked.clear()
    return running


def parquet_bytes(file: int) -> bytes:
    table = pa.table(
        {
            "text": ["" if row == 7 else f"Text {file}.{row} " + "word " * 50 for row in range(ROWS)],
            "id": [f"<urn:{file}:{row}>" for row in range(ROWS)],
            "url": [f"https://example.org/{row}" for row in range(ROWS)],
            "score": [row / 10 for row in range(ROWS)],
            "unwanted": ["x" * 100] * ROWS,
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=GROUP)
    return sink.getvalue()


def serve_ranges(data: bytes):
    def route(asked) -> Reply:
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}", "Content-Type": "application/octet-stream"}
        return Reply(data[first : last + 1], 206, headers)

    return route


def add_dataset(web: WebServer, files: int = 2) -> None:
    """Listing, resolve addresses and the storage host behind their redirects, as on the hub."""
    listed = []
    for index in range(files):
        data = parquet_bytes(index)
        path = f"/datasets/Org/data/resolve/refs%2Fconvert%2Fparquet/sample/train/{index:04d}.parquet"
        listed.append(NAMES | {"url": web.url(path, "hub.test"), "filename": f"{index:04d}.parquet", "size": len(data)})
        storage = web.url(f"/{index}?X-Amz-Signature=abc", "cdn.hub.test")
        web.routes[f"hub.test{path}"] = Reply(status=302, headers={"Location": storage})
        web.routes[f"cdn.hub.test/{index}"] = serve_ranges(data)
    answer = {"parquet_files": listed, "pending": [], "failed": [], "partial": False}
    web.routes["list.hub.test/parquet"] = json_reply(answer)


def run(web: WebServer, output, overrides=None, **settings) -> dict:
    hub = {"list_url": web.url("", "list.hub.test"), "file_hosts": ["*.hub.test"]} | NAMES | settings
    config = CrawlConfig(
        source="hub", output=str(output), fetch=fetch_config(retries=1), hub=HubConfig(**hub), **overrides or {}
    )
    return crawl(config, Outside(FakeTime().clock, resolver))


def test_all_rows_of_all_files(web, tmp_path):
    add_dataset(web)
    stats = run(web, tmp_path)
    assert stats["documents"] == 2 * (ROWS - 1) and stats["outcomes"] == {"kept": 2 * ROWS // GROUP}
    documents = list(read_documents(tmp_path))
    assert [d.id for d in documents] == [f"<urn:{f}:{r}>" for f in range(2) for r in range(ROWS) if r != 7]
    assert documents[0].text == "Text 0.0 " + "word " * 50 and documents[0].url == "https://example.org/0"
    assert documents[0].source == "Org/data" and documents[1].meta == {"score": 0.1}
    assert next(asked for asked in web.asked).query == {"dataset": "Org/data"}


def test_a_budget_ends_after_a_row_group_and_the_next_run_goes_on(web, tmp_path):
    add_dataset(web)
    assert run(web, tmp_path, overrides={"max_documents": 15})["documents"] == 19
    assert not [asked for asked in web.asked if asked.path.startswith("/1")], "the second file is not touched"
    stats = run(web, tmp_path)
    ids = [document.id for document in read_documents(tmp_path)]
    assert stats["documents"] == len(ids) == len(set(ids)) == 2 * (ROWS - 1)


def test_a_range_file_reads_what_the_file_holds(web):
    data = bytes(range(256)) * 40_000  # 10 MB, more than two of the chunks that are asked for at once
    web.routes["cdn.hub.test/x"] = serve_ranges(data)
    fetcher = Fetcher(fetch_config(), ["cdn.hub.test"], None, FakeTime().clock, resolver)
    file, reference = RangeFile(web.url("/x", "cdn.hub.test"), len(data), fetcher), io.BytesIO(data)
    for offset, whence, size in (
        (-8, 2, 8),
        (0, 0, 100),
        (50, 1, 3_999_000),
        (9_000_000, 0, 5_000_000),
        (0, 2, 5),
        (7, 0, -1),
    ):
        assert file.seek(offset, whence) == reference.seek(offset, whence)
        assert file.read(size) == reference.read(size) and file.tell() == reference.tell()
    assert sum(len(asked.headers["range"]) > 0 for asked in web.asked) <= 6


def test_a_short_range_or_a_broken_file_stops_with_one_line(web, tmp_path):
    add_dataset(web, files=1)
    data = parquet_bytes(0)
    web.routes["cdn.hub.test/0"] = lambda asked: Reply(b"short", 206)
    with pytest.raises(UserError, match=r"source=hub: the listing cannot be had \(short_range: "):
        run(web, tmp_path)
    web.routes["cdn.hub.test/0"] = serve_ranges(data[:-100] + bytes(100))
    with pytest.raises(UserError, match="is no whole parquet file"):
        run(web, tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"split": "test"}, r"hub\.config='sample' hub\.split='test': Org/data has no such .*; it has sample/train"),
        ({"text_key": "body"}, r"hub\.text_key='body' is no column that is read; see hub\.columns"),
    ],
)
def test_names_that_are_not_there(web, tmp_path, settings, problem):
    add_dataset(web, files=1)
    with pytest.raises(UserError, match=problem):
        run(web, tmp_path, **settings)
