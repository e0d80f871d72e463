"""The page and the terminal table of an evaluation: figures with intervals, by source, and responses to read.

What a model wrote is untrusted: it is escaped, its control characters become pictures, and the page's policy allows no
request and no script.
"""

from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from alignment.evaluate_answers import Answer
from configs.report import comparison_table
from configs.report_page import STYLE
from configs.report_samples import printable
from configs.run_dir import RunDir

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
SHOWN_EACH = 8  # right and wrong responses
SHOWN_CHARS = 3_000
MORE_STYLE = "pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0 0; }"
MORE_STYLE += " .sample { padding: 10px 16px; margin: 8px 0; }"
PLAIN_NUMBERS = ("response tokens",)


def write_evaluation_report(run_dir: RunDir, report: dict[str, Any], answers: list[list[Answer]]) -> Path:
    """Write report.html into the run directory; returns its path."""
    run_dir.write_text("report.html", build_page(report, answers))
    return run_dir.path / "report.html"


def build_page(report: dict[str, Any], answers: list[list[Answer]]) -> str:
    facts = report["run"]
    told = [facts["checkpoint"], facts["device"], f"torch {facts['torch']}", f"commit {facts['commit']}"]
    told.append(f"{facts['problems']:,} problems, {len(answers[0])} samples each")
    if facts["problems_too_long"]:
        told.append(f"{facts['problems_too_long']} left out, too long for the model's window")
    if facts["problems_repeated"]:
        told.append(f"{facts['problems_repeated']:,} left out, asked before")
    flat = [one for samples in answers for one in samples]
    sections = [
        f'<div class="title"><h1>{escape(facts["name"])}</h1></div>',
        f'<p class="facts">{escape(" · ".join(told))}</p>',
        figures_table("Figures", [(figure["name"], figure) for figure in report["figures"]]),
        figures_table("Accuracy by source", list(report["by_source"].items())) if len(report["by_source"]) > 1 else "",
        comparison_table(report["rows"]),
        reasons_table(flat),
        samples_section("Wrong or badly formed", [one for one in flat if not one.is_paid]),
        samples_section("Right and well formed", [one for one in flat if one.is_paid]),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(facts["name"])} – mew</title>
<style>{STYLE}{MORE_STYLE}</style>
</head>
<body>
<main>
{"".join(sections)}
<footer>Made from answers.jsonl and report.json beside it.</footer>
</main>
</body>
</html>
"""


def shown(name: str, value: float) -> str:
    return f"{value:.1f}" if name in PLAIN_NUMBERS else f"{100 * value:.1f}%"


def figures_table(title: str, figures: list[tuple[str, dict[str, Any]]]) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{shown(name, one["value"])}</td>'
        f'<td class="number">{shown(name, one["low"])} to {shown(name, one["high"])}</td>'
        f'<td class="note">{escape(one["method"])}</td></tr>'
        for name, one in figures
    )
    head = '<th>quantity</th><th class="number">value</th><th class="number">95% interval</th><th class="note">by</th>'
    return f"""<h2>{escape(title)}</h2>
<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
"""


def reasons_table(flat: list[Answer]) -> str:
    """How often the grader gave each reason."""
    counts: dict[str, int] = {}
    for one in flat:
        counts[one.reason] = counts.get(one.reason, 0) + 1
    rows = "".join(
        f'<tr><td>{escape(reason)}</td><td class="number">{count:,}</td></tr>'
        for reason, count in sorted(counts.items(), key=lambda pair: -pair[1])
    )
    return f"""<h2>What the grader saw</h2>
<div class="card scroll"><table><thead><tr><th>reason</th><th class="number">responses</th></tr></thead>
<tbody>{rows}</tbody></table></div>
"""


def samples_section(title: str, answers: list[Answer]) -> str:
    """The first few responses of a kind."""
    if not answers:
        return ""
    body = "".join(
        f'<div class="card sample"><div class="caption">{escape(printable(caption_of(one)))}</div>'
        f"<pre>{escape(printable(one.response[:SHOWN_CHARS]))}</pre></div>\n"
        for one in answers[:SHOWN_EACH]
    )
    caption = f'<p class="caption">{min(SHOWN_EACH, len(answers))} of {len(answers):,}.</p>'
    return f"<h2>{escape(title)}</h2>\n{caption}\n{body}"


def caption_of(one: Answer) -> str:
    return f"{one.id} · truth {one.truth} · answer {one.answer} · {one.reason} · {one.tokens} tokens"


def print_evaluation(report: dict[str, Any], page: Path) -> None:
    """The figures on the terminal, and where the page is."""
    table = Table(title=f"{report['run']['name']}: {report['run']['problems']:,} problems", title_justify="left")
    table.add_column("quantity")
    for name in ("value", "95% interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report["figures"]:
        name = one["name"]
        table.add_row(name, shown(name, one["value"]), f"{shown(name, one['low'])} to {shown(name, one['high'])}")
    console = Console()
    console.print(table)
    for name, why in (("problems_repeated", "ask what another one asks"), ("problems_too_long", "exceed the window")):
        if report["run"][name]:
            console.print(f"{report['run'][name]:,} problems left out: they {why}", highlight=False)
    for row in report["rows"]:
        told = f"{row['quantity']}: predicted {row['predicted']:.2f} s, measured {row['measured']:.2f} s"
        console.print(f"{told} ({row['note']})", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report          {page}", highlight=False, markup=False, soft_wrap=True)
