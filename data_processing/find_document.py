"""Where a document of a corpus went: kept, held out, dropped (by which stage and why), or refused by the source.

    python -m data_processing.find_document data/web/corpus "urn:uuid:..." [text]

Prints one JSON object a find; with a third argument `text` the document's text too. Exit code 1 when it is nowhere.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data_processing.document import DOCUMENT_SUFFIXES, read_documents, read_json_objects

PLACES = {"kept": "", "held out": "_held_out", "dropped": "_dropped"}
QUARANTINE = "quarantine.jsonl.gz"


def find_document(corpus: str | Path, document_id: str) -> Iterator[dict[str, Any]]:
    """Every find: {place, file, id, dropped, text}; a refused piece of input matches by the place where it stood."""
    corpus = Path(corpus).expanduser()
    if not (corpus / "stats.json").exists():
        raise UserError(f"{corpus} is no finished corpus (no stats.json); give the output= of a build")
    for place, folder in PLACES.items():
        for path in sorted((corpus / folder).glob("*.jsonl*")):
            if path.name.endswith(DOCUMENT_SUFFIXES) and path.name != QUARANTINE:
                yield from _find_in(path, place, document_id)
    refused = corpus / "_dropped" / QUARANTINE
    for _, row in read_json_objects(refused) if refused.exists() else ():
        if row["where"] == document_id or row["where"].endswith("/" + document_id):
            yield {"place": "refused by the source", "file": refused.name, **row}


def _find_in(path: Path, place: str, document_id: str) -> Iterator[dict[str, Any]]:
    for document in read_documents([path]):
        if document.id == document_id:
            why = document.meta.get("dropped", {})
            yield {"place": place, "file": path.name, "id": document.id, **why, "text": document.text}


def main() -> None:
    if len(sys.argv) not in (3, 4):
        print("error: usage: python -m data_processing.find_document CORPUS ID [text]", file=sys.stderr)
        sys.exit(2)
    try:
        found = list(find_document(sys.argv[1], sys.argv[2]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for row in found:
        shown = (
            row if len(sys.argv) == 4 else {name: value for name, value in row.items() if name not in ("text", "data")}
        )
        print(json.dumps(shown, ensure_ascii=False))
    sys.exit(0 if found else 1)


if __name__ == "__main__":
    main()
