"""What a source could not make a document of: counted by reason and kept in a file, so that no loss is silent.

One JSON object a line: `where` (file and line or byte offset), `reason`, `detail`, `data` (the bytes as text, what is
not UTF-8 as escapes such as \\xff). Every run writes the file anew, since each reads its input from the start; it
appears when the run ends well.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from data_processing.document import open_atomic


@dataclass
class Quarantine:
    """Counts refusals in `counts`; inside `writing_to` it also writes them down."""

    counts: Counter = field(default_factory=Counter)
    _waiting: list[bytes] = field(default_factory=list)  # refused before there was a file
    _path: Path | None = None
    _stack: ExitStack | None = None
    _file: object = None

    def add(self, where: str, reason: str, detail: str = "", data: bytes = b"") -> None:
        """Refuse what stands at `where`; `reason` is the name it is counted under."""
        self.counts[reason] += 1
        shown = data.decode("utf-8", errors="backslashreplace")
        line = {"where": where, "reason": reason, "detail": detail, "data": shown}
        encoded = json.dumps(line, ensure_ascii=False).encode("utf-8", errors="backslashreplace") + b"\n"
        if self._stack is None:
            self._waiting.append(encoded)
        else:
            self._write(encoded)

    def _write(self, line: bytes) -> None:
        if self._file is None:  # opened by the first refusal: no refusal, no file
            self._file = self._stack.enter_context(open_atomic(self._path))
        self._file.write(line)

    @contextmanager
    def writing_to(self, path: str | Path) -> Iterator[None]:
        """Write every refusal to `path` (.gz and .zst compress), whole when the block ends well."""
        with ExitStack() as stack:
            self._path, self._stack, self._file = Path(path), stack, None
            try:
                for line in self._waiting:
                    self._write(line)
                self._waiting = []
                yield
            finally:
                self._stack = self._file = None
