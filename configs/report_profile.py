"""The profile's part of report.html: where a step's time went, its memory over time by category, its largest blocks.

Reads profile/memory.json and profile/breakdown.json of a run directory (llm/training_profile writes them), each where
it is there. Never its pickle, which is for PyTorch's own viewer.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from configs.report_figures import Figure
from configs.report_numbers import SCALES, format_quantity
from configs.run_dir import read_json

FOLDER = "profile"
COLUMNS = ("forward", "backward")  # of the table of times; the rest of a row stands under "other"
SHOWN_ROWS = 24
NEGLIGIBLE = 1e-4  # a category that never reaches this share of the peak is left out of the figure


@dataclass
class Profile:
    """What a run's profile found; an empty dictionary where there is no file."""

    memory: dict[str, Any]
    breakdown: dict[str, Any]


def read_profile(run_dir: Path) -> Profile:
    """UserError for a file that is not JSON."""
    paths = [run_dir / FOLDER / name for name in ("memory.json", "breakdown.json")]
    return Profile(*(read_json(path) if path.exists() else {} for path in paths))


def block_name(block: dict[str, Any]) -> str:
    """The module that asked for a block, or the parameter that it belongs to."""
    if block["category"] in ("weights", "optimizer", "gradients") and block["name"]:
        return block["name"]
    return block["module"] or block["name"] or (f"({block['phase']})" if block["phase"] else "(before the step)")


def memory_figure(memory: dict[str, Any]) -> Figure | None:
    """Stacked areas of the categories; hovering tells the largest blocks of the moment."""
    if not memory:
        return None
    peak = memory["peak"]["bytes"]
    unit, scale = next((pair for pair in SCALES["bytes"] if peak >= pair[1]), SCALES["bytes"][-1])
    times = memory["times_ms"]
    traces = [
        {"x": times, "y": [value / scale for value in values], "name": name, "color": f"memory-{name}", "width": 0.5,
         "mode": "lines", "stack": True}
        for name, values in memory["categories"].items()
        if max(values) > NEGLIGIBLE * peak
    ]  # fmt: skip
    totals = [sum(values) for values in zip(*memory["categories"].values(), strict=True)]
    blocks = memory["blocks"]
    texts = ["<br>".join(hover_line(blocks[place]) for place in places) for places in memory["largest"]]
    total = {"x": times, "y": [value / scale for value in totals], "name": "total", "color": "ink", "width": 1}
    traces.append(total | {"mode": "lines", "text": texts, "step": True})
    spans = [{"x0": p["start_ms"], "x1": p["end_ms"], "label": p["name"]} for p in memory["phases"]]
    top = [{"y": peak / scale, "label": f"peak {format_quantity(peak, 'bytes')}"}]
    caption = (
        f"One step, {memory['source']}. Recording slows the step, so the "
        "time axis tells the order, not the speed. Hover for the largest blocks of a moment."
    )
    return Figure(
        "profile_memory", "Memory of a step by category", caption, unit, traces, x_title="ms since the step's start",
        wide=True, from_zero=True, hlines=top, spans=spans,
    )  # fmt: skip


def hover_line(block: dict[str, Any]) -> str:
    return escape(f"{format_quantity(block['bytes'], 'bytes')} {block['category']} {block_name(block)}")


def profile_section(profile: Profile, memory_chart: str) -> str:
    """Everything about the profile; `memory_chart` is the place of its figure. Empty without a profile."""
    if not profile.memory and not profile.breakdown:
        return ""
    return f"<h2>Profile</h2>\n{times_table(profile.breakdown)}{memory_chart}{blocks_table(profile.memory)}"


def table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """A table whose columns are numbers, but for the first `words`."""
    kinds = ["" if place < words else ' class="number"' for place in range(len(head))]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="plain"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n'
    )


def times_table(breakdown: dict[str, Any]) -> str:
    """Milliseconds a step by module and phase, and the operations that took longest."""
    if not breakdown:
        return ""
    on_gpu = breakdown["device"] == "cuda"
    name = "device_ms" if on_gpu else "host_ms"
    whole = breakdown["step_ms"]
    rows = sorted(breakdown["rows"], key=lambda row: -sum(row[name].values()))
    shown = [time_row(row["module"], row[name], whole, row["host_ms"] if on_gpu else None) for row in rows[:SHOWN_ROWS]]
    rest = rows[SHOWN_ROWS:]
    if rest:
        together = [added_up([row[kind] for row in rest]) for kind in (name, "host_ms")]
        shown.append(time_row(f"{len(rest)} more", together[0], whole, together[1] if on_gpu else None))
    if on_gpu:
        idle = max(0.0, whole - breakdown["busy_ms"])
        shown.append(time_row("(GPU idle)", {"": idle}, whole, {}))
    head = ["module", *COLUMNS, "other", "sum", "share of the step"] + (["host"] if on_gpu else [])
    caption = (
        f"{'Kernel time on the GPU' if on_gpu else 'Time on the host'}, ms a step, the mean of {breakdown['steps']} "
        f"traced steps of {format_quantity(whole / 1e3, 's')}. A module's time is its own, without the modules in it; "
        "layers are added up; in brackets what belongs to no module."
    )
    took = breakdown["operations"]
    calls = [[op["name"], f"{op['calls']:g}", milliseconds(op["ms"]), share(op["ms"], whole)] for op in took]
    operations = table(["kernel" if on_gpu else "operation", "calls", "ms", "share of the step"], calls)
    details = f"<details><summary>By operation</summary>{operations}</details>"
    return card("Where a step's time goes", caption, table(head, shown) + details)


def added_up(rows: list[dict[str, float]]) -> dict[str, float]:
    return {phase: sum(row.get(phase, 0.0) for row in rows) for phase in {phase for row in rows for phase in row}}


def card(title: str, caption: str, body: str) -> str:
    head = f'<div class="head"><h3>{escape(title)}</h3><p class="caption">{escape(caption)}</p></div>'
    return f'<div class="card">{head}{body}</div>\n'


def time_row(module: str, times: dict[str, float], whole: float, host: dict[str, float] | None) -> list[str]:
    total = sum(times.values())
    other = total - sum(times.get(phase, 0.0) for phase in COLUMNS)
    cells = [*(times.get(phase, 0.0) for phase in COLUMNS), other, total]
    host_cell = [] if host is None else [milliseconds(sum(host.values()))]
    return [module, *(milliseconds(cell) for cell in cells), share(total, whole), *host_cell]


def milliseconds(value: float) -> str:
    return "" if value < 5e-4 else f"{value:.3f}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "–"


def blocks_table(memory: dict[str, Any]) -> str:
    """The largest blocks of the step: whose, how large, and when they lived."""
    if not memory:
        return ""
    rows = [block_row(memory["blocks"][place]) for place in memory["table"]]
    head = ["module or parameter", "category", "made in", "at the peak", "bytes", "from (ms)", "to (ms)"]
    told = [
        f"{name.removesuffix('_bytes').replace('_', ' ')} {format_quantity(value, 'bytes')}"
        for name, value in memory["measured"].items()
    ]
    counters = f" The allocator's own counters: {', '.join(told)}." if told else ""
    return card("Largest blocks", f"The {len(rows)} largest of the step.{counters}", table(head, rows, words=4))


def block_row(block: dict[str, Any]) -> list[str]:
    born, died = block["born_ms"], block["died_ms"]
    times = ["before" if born is None else f"{born:.2f}", "after" if died is None else f"{died:.2f}"]
    made_in = block["phase"] or "–"
    at_peak = "yes" if block["at_peak"] else ""
    return [block_name(block), block["category"], made_in, at_peak, format_quantity(block["bytes"], "bytes"), *times]
