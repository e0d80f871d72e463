"""The library of kernel/decode_cpu is built once, kept, and missed with a warning where it cannot be built."""

import pytest

from kernel.decode_cpu_build import decode_library, load_library

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "version {version}" && exit 0
echo compiled >> {log}
while [ "$1" != -o ]; do shift; done
cp {library} "$2"
"""


@pytest.fixture
def library():
    built = decode_library()
    if built is None:
        pytest.skip("no C++ compiler builds kernel/decode_cpu.cpp here")
    return built


def make_compiler(directory, text: str) -> str:
    path = directory / "compiler"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_built_once_for_each_compiler(tmp_path, library):
    log, kept = tmp_path / "log", tmp_path / "cache"
    for version, builds in [(1, 1), (1, 1), (2, 2), (1, 2)]:
        compiler = make_compiler(tmp_path, COMPILER.format(version=version, log=log, library=library._name))
        assert load_library(compiler, kept).decode is not None
        assert log.read_text().count("compiled") == builds
    assert len(list(kept.iterdir())) == 2, "nothing unfinished is left"


def test_a_library_that_cannot_be_built_is_told_of_and_leaves_nothing(tmp_path):
    failing = make_compiler(tmp_path, '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such target >&2\nexit 1\n')
    with pytest.warns(UserWarning, match=r"decode_cpu.cpp was not built with .*no such target.*PyTorch's operations"):
        assert load_library(failing, tmp_path / "cache") is None
    assert not list((tmp_path / "cache").iterdir())
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.warns(UserWarning, match="was not built"):
        assert load_library(failing, in_the_way) is None


def test_without_a_compiler_there_is_no_library(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.warns(UserWarning, match="install g"):
        assert decode_library.__wrapped__() is None
