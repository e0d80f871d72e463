"""The corpus that every installation carries: the documentation of Python, NumPy and PyTorch, read where it lies.

pydoc's topics (the language reference), and the docstrings of the standard library, numpy and torch. Docstrings are
taken from the source files by `ast`, without importing anything: no side effects, the same order everywhere. Nothing
is copied into the repository; the text differs by installed version, so `identity` names the versions. One document
is one topic, one module (its docstrings in the order of its source) or one built-in function. Licences:
docs/data_licences.md.
"""

import ast
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from data_processing.document import Document
from data_processing.quarantine import Quarantine

MIN_CHARACTERS = 300  # a module with less documentation teaches nothing
PLACEHOLDER = re.compile(r"^[ \t]*\{\w+\}[ \t]*\n?|\{\w+\}", re.MULTILINE)
SKIPPED_FOLDERS = {"test", "tests", "testing", "site-packages"}  # and what is no reading matter, or gone in 3.12:
SKIPPED_FOLDERS |= {"idlelib", "lib2to3", "turtledemo", "encodings", "distutils"}
# torch's public API. Left out: compiler internals (_inductor, _dynamo, fx passes), whose docstrings are notes for
# their authors, and vendored copies of other projects.
TORCH_FOLDERS = {"autograd", "distributed", "distributions", "fft", "func", "linalg", "nn", "optim", "sparse"}
TORCH_FOLDERS |= {"special", "utils", "masked", "nested", "amp", "signal", "futures"}
# Where the docstrings of functions written in C++ or C are attached: calls of add_docstr(function, text) and the like.
ATTACHED = {"torch": ("_torch_docs.py", "_tensor_docs.py", "_storage_docs.py"), "numpy": ("_core/_add_newdocs.py",)}
ATTACHING = {"add_docstr", "add_docstr_all", "add_newdoc"}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class EmbeddedSource:
    """Documents of source "embedded"; meta.part says which of pydoc, stdlib, numpy, torch they come from."""

    counts: Counter = field(default_factory=Counter)
    total_bytes: int | None = None
    quarantine: Quarantine = field(init=False)

    def __post_init__(self):
        self.quarantine = Quarantine(self.counts)

    def identity(self) -> dict[str, Any]:
        return {"python": platform.python_version(), "numpy": version("numpy"), "torch": version("torch")}

    def documents(self) -> Iterator[Document]:
        for topic in sorted(topics):
            yield _make_document("pydoc", topic, topics[topic])
        yield from self._module_documents("stdlib", Path(sysconfig.get_paths()["stdlib"]), "")
        for part in ("numpy", "torch"):
            root = Path(find_spec(part).origin).parent
            yield from self._module_documents(part, root, part)
            for path in (root / name for name in ATTACHED[part]):
                if path.exists():
                    yield from _attached_documents(part, path)
                else:  # these files have moved between versions
                    self.counts["missing_files"] += 1

    def _module_documents(self, part: str, root: Path, package: str) -> Iterator[Document]:
        """One document for each module under `root` that has enough docstrings."""
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if not _is_wanted(part, relative):
                continue
            try:
                tree = _parse(path)
            except (SyntaxError, ValueError):  # templates and files for other Python versions
                self.counts["unparsable_files"] += 1
                continue
            names = [package, *relative.with_suffix("").parts]
            module = ".".join(name for name in names if name and name != "__init__")
            body = "\n\n".join(_docstrings(tree, ""))
            if len(body) >= MIN_CHARACTERS:
                yield _make_document(part, module or package, body)


def _make_document(part: str, title: str, body: str) -> Document:
    return Document(f"{part}:{title}", "embedded", f"{title}\n\n{body.strip()}\n", title=title, meta={"part": part})


def _is_wanted(part: str, relative: Path) -> bool:
    folders = relative.parts[:-1]
    if part == "torch":
        private = any(name.startswith("_") for name in (*folders, relative.stem)) and relative.stem != "__init__"
        return not private and (not folders or folders[0] in TORCH_FOLDERS)
    return not SKIPPED_FOLDERS.intersection(folders)


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's invalid escapes
        return ast.parse(path.read_bytes())


def _docstrings(node: ast.Module | Definition, prefix: str) -> Iterator[str]:
    """The docstring of a node under its signature, then those of the classes and functions inside it."""
    docstring = ast.get_docstring(node)
    if isinstance(node, ast.Module):
        if docstring:
            yield docstring
    else:
        prefix = f"{prefix}{node.name}"
        if docstring:
            yield f"{_signature(node, prefix)}\n{_indent(docstring)}"
        prefix += "."
    for child in node.body:
        if isinstance(child, Definition):
            yield from _docstrings(child, prefix)


def _signature(node: Definition, name: str) -> str:
    """`class Name(bases)` or `name(arguments)`, without annotations."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"{name}({ast.unparse(node.args)})"


def _indent(docstring: str) -> str:
    return "\n".join(f"    {line}" if line.strip() else "" for line in docstring.split("\n"))


def _attached_documents(part: str, path: Path) -> Iterator[Document]:
    """One document for each documentation string that a file attaches to a built-in function."""
    seen = Counter()
    for node in ast.walk(_parse(path)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ATTACHING):
            continue
        *place, value = node.args
        title, text = _attached_title(part, place, value), _constant_text(value)
        if len(text) < MIN_CHARACTERS:
            continue
        seen[title] += 1
        yield _make_document(part, title if seen[title] == 1 else f"{title} ({seen[title]})", text)


def _attached_title(part: str, place: list[ast.expr], value: ast.expr) -> str:
    """numpy.ndarray.sort from add_newdoc("numpy._core.x", "ndarray", ("sort", ...)); torch.abs from its own call."""
    names = [node.value if isinstance(node, ast.Constant) else ast.unparse(node) for node in place]
    if isinstance(value, ast.Tuple):
        names.append(_constant_text(value.elts[0]))
    if part == "numpy":
        names[0] = "numpy"
    elif not names[0].startswith("torch"):
        names[0] = f"torch.Tensor.{names[0]}"
    return ".".join(names)


def _constant_text(value: ast.expr) -> str:
    """The text of a constant, of constants added up, of `constant.format(...)` (placeholders dropped), of a pair."""
    if isinstance(value, ast.Tuple):
        return _constant_text(value.elts[-1])
    if isinstance(value, ast.BinOp):
        return _constant_text(value.left) + _constant_text(value.right)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        text = _constant_text(value.func.value)
        return PLACEHOLDER.sub("", text).replace("{{", "{").replace("}}", "}")
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    return ""
