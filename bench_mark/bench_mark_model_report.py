"""What a benchmark prints and stores: where it ran, a table, and one JSON document as the last line."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from configs.report_numbers import format_quantity
from configs.run_dir import write_json_atomic
from configs.version import git_commit
from llm.hardware import Hardware

COLUMNS = f"{'model':10} {'variant':24} {'quantity':12} {'predicted':>12} {'measured':>12} {'ratio':>6}  bound"


def facts(hardware: Hardware, dtype: str) -> dict[str, Any]:
    """Hardware, dtype, versions and commit of a benchmark, and the rates that its predictions were made from."""
    return {
        "hardware": hardware.description,
        "peak_flops": hardware.peak_flops(dtype),
        "dtype": dtype,
        "torch": torch.__version__,
        "commit": git_commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "rates": asdict(hardware.rates),
    }


def print_head(known: dict[str, Any]) -> None:
    print(f"{known['hardware']} · {known['dtype']} · torch {known['torch']} · commit {known['commit']}")
    print(COLUMNS)


def print_row(model: str, variant: str, row: dict[str, Any], bound: str) -> None:
    """One quantity of one variant; a baseline has no prediction."""
    predicted, measured = (format_quantity(row[key], row["unit"]) for key in ("predicted", "measured"))
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
    print(f"{model:10} {variant:24} {row['quantity']:12} {predicted:>12} {measured:>12} {ratio:>6}  {bound}")


def write_document(document: dict[str, Any], path: str | Path) -> None:
    """Write a benchmark's JSON document, in a folder that is made if need be, and print the same as the last line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, document)
    print(json.dumps(document))
