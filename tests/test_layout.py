"""The guard of the house: file and function sizes, and imports that run one way only (see README.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["configs", "llm", "kernel", "parallel", "data_processing", "alignment", "bench_mark"]
ALLOWED = {
    "configs": set(),
    "kernel": {"configs"},
    "parallel": {"configs"},
    "data_processing": {"configs"},
    "llm": {"configs", "kernel", "parallel", "data_processing"},
    "alignment": {"configs", "kernel", "parallel", "data_processing", "llm"},
    "bench_mark": set(FOLDERS),
}
MAX_FILE_LINES, MAX_KERNEL_FILE_LINES = 400, 500
MAX_FUNCTION_LINES, MAX_LONG_FUNCTION_LINES = 60, 100  # the longer bound: kernels and pipeline schedules
MAX_PARAMETERS = 7
LIBRARY_FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported_modules(tree: ast.AST) -> set[str]:
    """Every module a file imports, at any depth; `from a import b` counts as both a and a.b."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: use absolute imports"
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def is_script(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text(encoding="utf-8")


def is_jit(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=name_of)
def test_imports_follow_the_arrows(path):
    folder = path.relative_to(ROOT).parts[0]
    modules = imported_modules(ast.parse(path.read_text(encoding="utf-8")))
    ours = {module for module in modules if module.split(".")[0] in FOLDERS}
    forbidden = {m for m in ours if m.split(".")[0] != folder and m.split(".")[0] not in ALLOWED[folder]}
    if folder == "llm":
        forbidden |= {m for m in ours if m.startswith("data_processing.") and m.split(".")[1] != "document"}
    assert not forbidden, f"{name_of(path)} imports {sorted(forbidden)}"


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=name_of)
def test_no_library_module_imports_a_script(path):
    scripts = {module_of(p) for p in LIBRARY_FILES if is_script(p)} - {module_of(path)}
    if path.relative_to(ROOT).parts[0] == "bench_mark":
        return  # a benchmark measures what a user runs
    imported = imported_modules(ast.parse(path.read_text(encoding="utf-8"))) & scripts
    assert not imported, f"{name_of(path)} imports the scripts {sorted(imported)}"


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=name_of)
def test_files_and_functions_fit_their_bounds(path):
    text = path.read_text(encoding="utf-8")
    in_kernel = path.relative_to(ROOT).parts[0] == "kernel"
    lines = text.count("\n")
    assert lines <= (MAX_KERNEL_FILE_LINES if in_kernel else MAX_FILE_LINES), f"{lines} lines"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = node.end_lineno - node.lineno + 1
        long_kind = is_jit(node) or path.stem.startswith("pipeline_schedules")
        bound = MAX_LONG_FUNCTION_LINES if long_kind else MAX_FUNCTION_LINES
        assert length <= bound, f"{node.name}: {length} lines, at most {bound}"
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        count = len([a for a in arguments if a.arg not in ("self", "cls")])
        assert is_jit(node) or count <= MAX_PARAMETERS, f"{node.name}: {count} parameters"


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=name_of)
def test_house_rules(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name == "__init__.py":
        assert not tree.body, "an __init__.py stays empty"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"line {node.lineno}: import *"
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            allowed = module_of(path) == "parallel.mesh"
            assert allowed, f"line {node.lineno}: only parallel/mesh.py reads the environment"
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            assert not (silent and broad), f"line {node.lineno}: an exception is swallowed"


def test_llm_has_no_module_named_after_the_standard_library():
    import sys

    clashes = {path.stem for path in (ROOT / "llm").glob("*.py")} & set(sys.stdlib_module_names) - {"__init__"}
    assert not clashes, f"`python llm/x.py` would import {sorted(clashes)} instead of the standard module"
