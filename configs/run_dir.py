"""A run's directory and the atomic files in it: what a reader finds is always whole.

runs/<name>/ holds config.yaml, metrics.jsonl, report.json, report.html, samples.txt and checkpoints/. The run
directory, not stdout, is the record. Only rank 0 writes here.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs.errors import UserError


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, so that a rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes_atomic(path: str | Path, content: bytes) -> None:
    """Write a file beside its place, sync it and rename it: the old file or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_text_atomic(path: str | Path, text: str) -> None:
    write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: str | Path, value: Any) -> None:
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def is_plain_file_name(name: Any) -> bool:
    """Whether a name read from a file that someone else may have made stays within the directory it is joined to."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name and "\0" not in name


def read_json(path: str | Path) -> Any:
    """Read a JSON file; UserError names the file when it is missing or broken."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; check the path or make it first") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); make it again") from error


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; a last line cut off by a kill is left out."""
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


class RunDir:
    """Paths and writers of one run directory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"

    def create(self) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def write_text(self, name: str, text: str) -> None:
        write_text_atomic(self.path / name, text)

    def write_json(self, name: str, value: Any) -> None:
        write_json_atomic(self.path / name, value)

    def update_json(self, name: str, **fields: Any) -> None:
        """Add fields to a JSON object file, atomically."""
        path = self.path / name
        known = read_json(path) if path.exists() else {}
        write_json_atomic(path, known | fields)

    def append_jsonl(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        """Append one JSON line a record; each line is whole or, after a kill, the last."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(text)

    def drop_lines_after(self, name: str, step: int) -> None:
        """Keep only the lines of a JSONL file up to `step`: a resumed run continues its own record without doubles."""
        path = self.path / name
        if path.exists():
            kept = [line for line in read_jsonl(path) if line["step"] <= step]
            write_text_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
