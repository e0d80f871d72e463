"""report.html of a corpus: one self-contained page with the drop table, the sources and what was dropped."""

from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8884; --kept: #2a7f62; --lost: #c8553d; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 0 0 2rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td { font-variant-numeric: tabular-nums; }
.bar { display: flex; width: 9rem; height: .8rem; margin-top: .35rem; background: var(--lost); }
.bar i { background: var(--kept); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--lost); padding-left: .8rem; }
summary { cursor: pointer; }
"""
COLUMNS = ("in", "out", "kept", "MB in", "MB out", "dropped")
HEAD = "<th>stage</th><th class='text'>source</th>" + "".join(f"<th>{name}</th>" for name in COLUMNS)


def render_report(stats: dict[str, Any]) -> str:
    """The page's HTML from stats.json's content; every text in it is escaped."""
    facts = f"{stats['documents']:,} documents, {stats['bytes'] / 1e6:,.2f} MB (files: {len(stats['shards'])})"
    if held_out := stats["held_out"]["documents"]:
        facts += f" and {held_out:,} held out"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Corpus report</title>",
        "<meta name='viewport' content='width=device-width'>",
        f"<style>{STYLE}</style></head><body><h1>Corpus report</h1>",
        f"<p>{facts}, of {stats['documents_read']:,} documents read.</p>",
        f"<h2>What each stage kept</h2><table><tr>{HEAD}</tr>{_stage_rows(stats)}</table>",
        f"<h2>Time</h2><table><tr><th>step</th><th>seconds</th><th>MB/s</th></tr>{_time_rows(stats)}</table>",
        _counts("While reading", stats["source_counts"]),
        *(_counts(f"In {name}", part["counts"]) for name, part in stats["stages"].items() if part.get("counts")),
        _mix_table(stats.get("mix", {})),
        f"<h2>Examples of what was dropped</h2>{_examples(stats['examples'])}",
        "<p>All of them, with their reasons: <code>_dropped/</code>. The build's settings: stats.json.</p>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _stage_rows(stats: dict[str, Any]) -> str:
    rows = []
    for stage, part in stats["stages"].items():
        sources = part["sources"] if len(part["sources"]) == 1 else part["sources"] | {"all sources": part["total"]}
        for source, counts in sources.items():
            rows.append(_stage_row(stage, source, counts))
    return "\n".join(rows)


def _stage_row(stage: str, source: str, counts: dict[str, Any]) -> str:
    share = 100 * counts["documents_out"] / max(counts["documents_in"], 1)
    reasons = "<br>".join(f"{escape(reason)} {count:,}" for reason, count in counts["dropped"].items()) or "-"
    return (
        f"<tr><td>{escape(stage)}</td><td class='text'>{escape(source)}</td>"
        f"<td>{counts['documents_in']:,}</td><td>{counts['documents_out']:,}</td>"
        f"<td title='{share:.2f}% kept'><div class='bar'><i style='width:{share:.2f}%'></i></div></td>"
        f"<td>{counts['bytes_in'] / 1e6:,.2f}</td><td>{counts['bytes_out'] / 1e6:,.2f}</td><td>{reasons}</td></tr>"
    )


def _time_rows(stats: dict[str, Any]) -> str:
    seconds = stats["seconds"]
    steps = [("read", seconds["read"], None)]
    steps += [(name, part["seconds"], part["mb_per_s"]) for name, part in stats["stages"].items()]
    steps += [("write", seconds["write"], None), ("waiting and handing over", seconds["wait"], None)]
    steps += [(f"by the clock, {stats['workers']} processes for the stages", seconds["wall"], None)]
    rows = []
    for name, seconds, speed in steps:
        shown = f"{speed:,.1f}" if speed else "-"
        rows.append(f"<tr><td>{escape(name)}</td><td>{seconds:.2f}</td><td>{shown}</td></tr>")
    return "\n".join(rows)


def _counts(where: str, counts: dict[str, int]) -> str:
    items = ", ".join(f"{escape(name)}: {count:,}" for name, count in counts.items())
    return f"<p>{escape(where)}: {items}.</p>" if items else ""


def _mix_table(shares: dict[str, dict[str, Any]]) -> str:
    """What each source was to give and gives, "" without a mix."""
    if not shares:
        return ""
    head = "<th>source</th><th>weight</th><th>M tokens there</th><th>M tokens wanted</th><th>epochs</th>"
    rows = [
        f"<tr><td>{escape(name)}</td><td>{share['weight']:.3f}</td><td>{share['available_tokens'] / 1e6:,.2f}</td>"
        f"<td>{share['budget_tokens'] / 1e6:,.2f}</td>"
        f"<td>{share['epochs']:.2f}{' (all that max_epochs allows)' if share['capped'] else ''}</td></tr>"
        for name, share in shares.items()
    ]
    return f"<h2>Mix</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _examples(examples: list[dict[str, str]]) -> str:
    if not examples:
        return "<p>Nothing was dropped.</p>"
    return "\n".join(
        f"<details><summary>{escape(e['stage'])}: {escape(e['reason'])}, {escape(e['id'])}"
        f" ({escape(e['detail'])})</summary><pre>{escape(e['text'])}</pre></details>"
        for e in examples
    )
