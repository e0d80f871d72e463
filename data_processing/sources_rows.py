"""From a row of somebody else's data (a JSON object, a dataset row) to a Document."""

from dataclasses import dataclass
from typing import Any

from configs.errors import UserError
from data_processing.document import Document


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
