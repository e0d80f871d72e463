"""The Debian corpus script with apt and dpkg played by a function: sorting, metapackages, and what is not to be had."""

import gzip
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.loader import compose_config
from data_processing import debian_docs
from data_processing.debian_docs import DebianDocsConfig, body, real_package

DEPENDS = "linux-doc\n  Depends: linux-doc-6.1\n"


def play(*command: str, folder: Path) -> tuple[int, str]:
    """apt-cache, apt-get and dpkg as they answer for linux-doc, a plain package, and one that is not there."""
    if command[0] == "apt-cache":
        return (0, DEPENDS) if command[-1] == "linux-doc" else (0, f"{command[-1]}\n  Depends: python3:any\n")
    if command[:2] == ("apt-get", "download"):
        if command[2] == "nowhere-doc":
            return 100, "E: Unable to locate package nowhere-doc"
        (folder / f"{command[2]}_1_all.deb").write_bytes(b"!<arch>")
        return 0, ""
    if "broken" in command[2]:
        return 2, "not a debian archive"
    share = folder / "tree/usr/share"
    for name, data in {
        "doc/x/index.html": b"<p>page",
        "doc/x/sub/b.html.gz": gzip.compress(b"<p>b"),
        "doc/x/a.pdf": b"%PDF",
        "doc/x/picture.png": b"PNG",
        "dictd/x.dict.dz": gzip.compress(b"a word"),
    }.items():
        (share / name).parent.mkdir(parents=True, exist_ok=True)
        (share / name).write_bytes(data)
    (share / "doc/x/link.html").symlink_to("index.html")
    return 0, ""


@pytest.fixture(autouse=True)
def no_apt(monkeypatch):
    monkeypatch.setattr(debian_docs, "run", play)


def configure(tmp_path, *packages: str) -> DebianDocsConfig:
    return compose_config(DebianDocsConfig, "debian_docs", [f"output='{tmp_path}'", f"packages=[{','.join(packages)}]"])


def test_files_are_sorted_by_kind_and_package(tmp_path, capsys):
    total = body(configure(tmp_path, "x-doc", "nowhere-doc"))
    found = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert found == [
        "html/x-doc/doc/x/index.html",
        "html/x-doc/doc/x/sub/b.html.gz",
        "pdf/x-doc/doc/x/a.pdf",
        "text/x-doc/dictd/x.txt",
    ]
    assert (tmp_path / "text/x-doc/dictd/x.txt").read_bytes() == b"a word"
    assert total["pdf"] == 4 and total["text"] == 6
    assert "nowhere-doc: not fetched (E: Unable to locate package nowhere-doc)" in capsys.readouterr().err


def test_metapackages_and_errors(tmp_path):
    assert real_package("linux-doc", tmp_path) == "linux-doc-6.1" and real_package("x-doc", tmp_path) == "x-doc"
    with pytest.raises(UserError, match="none of nowhere-doc was fetched"):
        body(configure(tmp_path, "nowhere-doc"))
    with pytest.raises(UserError, match="dpkg could not unpack broken-doc_1_all"):
        body(configure(tmp_path, "broken-doc"))
