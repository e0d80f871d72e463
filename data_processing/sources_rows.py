"""From a row of somebody else's data (a JSON object, a dataset row) to a Document."""

import json
from dataclasses import dataclass
from typing import Any

from configs.errors import UserError
from data_processing.document import Document
from data_processing.quarantine import Quarantine


@dataclass
class RowFields:
    """Which keys of a row hold what; `source_name` replaces the row's own source when it is set."""

    text_key: str = "text"
    id_key: str = "id"
    source_name: str = ""
    default_source: str = "jsonl"


def document_from_row(row: dict[str, Any], names: RowFields, where: str, default_id: str) -> Document:
    """The row's text, id, source, title, url and date; every other key goes to meta. UserError names `where`."""
    row = dict(row)
    text = row.pop(names.text_key, None)
    if not isinstance(text, str):
        problem = "is missing" if text is None else f"is a {type(text).__name__}"
        raise UserError(f"{where}: text_key={names.text_key!r} {problem}; the row's keys are {', '.join(sorted(row))}")
    document_id = row.pop(names.id_key, None)
    meta = row.pop("meta") if isinstance(row.get("meta"), dict) else {}
    strings = {name: row.pop(name) for name in ("source", "title", "url", "date") if isinstance(row.get(name), str)}
    source = names.source_name or strings.pop("source", "") or names.default_source
    strings.pop("source", None)
    return Document(
        id=default_id if document_id in (None, "") else str(document_id),
        source=source,
        text=text,
        meta=meta | row,
        **strings,
    )


def document_or_refusal(
    row: dict[str, Any], names: RowFields, places: tuple[str, str], quarantine: Quarantine, first: bool
) -> Document | None:
    """The row's document, or None when it has no text and went to the quarantine; `places` are (where, default id).

    A first row without text means that `text_key` is wrong, which is the user's to mend: UserError.
    """
    where, default_id = places
    if not first and not isinstance(row.get(names.text_key), str):
        shown = json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", errors="backslashreplace")
        quarantine.add(where, "no_text", f"text_key={names.text_key!r} is missing or no text", shown)
        return None
    return document_from_row(row, names, where, default_id)
