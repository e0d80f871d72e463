"""What README, docs/ and the heads of modules say can be run is parsed as written; what they link to is there.

Nothing is run: a command's overrides are composed into its config, or its options looked up in its own --help.
"""

import ast
import contextlib
import importlib
import io
import re
import runpy
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.loader import compose_config
from tests.test_layout import FOLDERS, LIBRARY_FILES, ROOT, name_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = re.compile(rf"-m ((?:{'|'.join(FOLDERS)})\.\w+)(.*)")
FENCED = re.compile(r"^( *)```[a-z]*\n(.*?)^\1```", re.S | re.M)
START = re.compile(r'start_script\(main, (\w+), "(\w+)"\)')


def commands_of(text: str, inline: bool) -> list[str]:
    """The lines of code blocks that run one of our modules, and with `inline` such code within a sentence."""
    lines = "\n".join(block for _, block in FENCED.findall(text)).replace("\\\n", " ").splitlines()
    if inline:
        lines += re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    return [line.strip() for line in lines if COMMANDS.search(line)]


def commands_of_head(path: Path) -> list[str]:
    """The indented commands in a module's docstring."""
    text = path.read_text(encoding="utf-8")
    if not COMMANDS.search(text):
        return []  # parsing every file would take seconds
    head = ast.get_docstring(ast.parse(text)) or ""
    lines = head.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.startswith("    ") and COMMANDS.search(line)]


def all_commands() -> list:
    """(where, command), but for those of which every word has been seen before; heads of modules are slow tests.

    The log tells what was run at its time and is left alone.
    """
    found, seen = [], set()
    for path in [*(page for page in PAGES if page.name != "LOG.md"), *LIBRARY_FILES]:
        is_page = path.suffix == ".md"
        commands = commands_of(path.read_text(encoding="utf-8"), inline=True) if is_page else commands_of_head(path)
        for command in commands:
            module, rest = COMMANDS.search(command).groups()
            words = {(module, word) for word in ("", *rest.split("  #")[0].split())}
            if not words <= seen:
                seen |= words
                marks = () if is_page else (pytest.mark.slow,)
                found.append(pytest.param(name_of(path), command, marks=marks, id=f"{name_of(path)}-{command[:60]}"))
    return found


@cache
def help_of(path: Path) -> str:
    """What a script with an argument parser prints for --help."""
    before, sys.argv = sys.argv, [str(path), "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
    return said.getvalue()


def check_overrides(module: str, source: str, overrides: list[str], elided: bool) -> None:
    """Compose them; where the command leaves something out ("..."), a value that must be given may be missing."""
    schema, config_name = START.search(source).groups()
    try:
        compose_config(getattr(importlib.import_module(module), schema), config_name, overrides)
    except UserError as error:
        assert (elided and "must be given" in str(error)) or "is not a directory" in str(error), error


@pytest.mark.parametrize(("where", "command"), all_commands())
def test_a_command_of_the_docs_is_one_that_its_script_takes(where, command):
    module, rest = COMMANDS.search(command).groups()
    path = ROOT / f"{module.replace('.', '/')}.py"
    assert path.exists(), f"{where} names {module}, which is not there"
    words = shlex.split(rest.split(";")[0], comments=True)
    given, source = [word for word in words if word != "..."], path.read_text(encoding="utf-8")
    if START.search(source):
        check_overrides(module, source, given, elided=not given or "..." in words)
        return
    names = [word.split("=")[0] for word in given if re.match(r"--|\w+=", word)]
    if "ArgumentParser" in source:
        missing = [name for name in names if name.startswith("--") and not re.search(rf"{name}\b", help_of(path))]
    else:
        missing = [name for name in names if not re.search(rf"^    {name}: ", source, re.M)]
    assert not missing, f"{where}: {module} takes no {missing}"


def anchors_of(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_links_to_is_there(page):
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text(encoding="utf-8")))
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            dead.append(link)
    assert not dead, f"{name_of(page)} links to {dead}"


def test_every_chapter_is_in_the_readmes_list():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    unlisted = [name_of(page) for page in PAGES[1:] if page.name != "LOG.md" and f"({name_of(page)})" not in readme]
    assert not unlisted, f"README.md leads to no {unlisted}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_named_in_a_page_is_there(folder):
    """Such as `llm/transformer.py` or `llm/evaluating*.py`; generated and removed files are named in the log alone."""
    dead = []
    for page in PAGES:
        if page.name == "LOG.md":
            continue
        text = page.read_text(encoding="utf-8")
        for name in re.findall(rf"`({folder}/[\w/*.\-]+\.(?:py|yaml|json))`", text):
            if not list(ROOT.glob(name)):
                dead.append(f"{name_of(page)}: {name}")
    assert not dead, dead
