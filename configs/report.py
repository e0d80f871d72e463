"""report.html: a run on one page, from the files of its directory alone, readable offline and by anyone.

Reads config.yaml, metrics.jsonl, report.json, evaluation.json, samples.txt and profile/, each where it is there. Names,
notes and samples are untrusted text and are escaped. Rebuild it with `python -m configs.report_cli runs/<name>`.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.report_figures import Figure, build_figures
from configs.report_numbers import format_quantity, format_ratio, is_within_bounds
from configs.report_page import POLICY, SCRIPT, STYLE
from configs.report_profile import Profile, memory_figure, profile_section, read_profile
from configs.report_rl import FILE_NAME as COMPLETIONS
from configs.report_rl import completions_section, rl_figures
from configs.report_samples import Sample, printable, read_samples
from configs.report_schedule import schedule_section
from configs.run_dir import read_json, read_jsonl, write_text_atomic

FILE_NAME = "report.html"
SHOWN_SAMPLES = 6


@dataclass
class RunFiles:
    """Everything that the report shows, as read from the run directory."""

    path: Path
    report: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluation: dict[str, Any]
    samples: list[Sample]
    config_text: str
    profile: Profile
    completions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def validation(self) -> dict[str, Any]:
        """The last validation of training, or an evaluation run by hand of as late a checkpoint."""
        validation = self.report.get("validation") or {}
        evaluated_step = str(self.evaluation.get("checkpoint", "")).removeprefix("step_")
        is_newer = evaluated_step.isdecimal() and int(evaluated_step) >= validation.get("step", 0)
        return self.evaluation if is_newer or not validation else validation

    @property
    def loss_by_position(self) -> list[dict[str, Any]]:
        return self.evaluation.get("loss_by_position") or self.validation.get("loss_by_position") or []

    def last(self, name: str) -> Any:
        """The newest value of a metric, or None."""
        return next((line[name] for line in reversed(self.metrics) if line.get(name) is not None), None)


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run directory; UserError when there is nothing to report."""
    path = Path(run_dir)
    if not (path / "report.json").exists() and not (path / "metrics.jsonl").exists():
        raise UserError(f"{path} holds neither report.json nor metrics.jsonl; give a run such as runs/quickstart")
    report, evaluation = (
        read_json(path / name) if (path / name).exists() else {} for name in ("report.json", "evaluation.json")
    )
    config = path / "config.yaml"
    config_text = config.read_text(encoding="utf-8") if config.exists() else ""
    metrics, profile = read_jsonl(path / "metrics.jsonl"), read_profile(path)
    completions = read_jsonl(path / COMPLETIONS)
    return RunFiles(path, report, metrics, evaluation, read_samples(path), config_text, profile, completions)


def write_report(run_dir: str | Path) -> Path:
    """Write the page of a run into its directory and return its path."""
    path = Path(run_dir) / FILE_NAME
    write_text_atomic(path, build_page(read_run(run_dir)))
    return path


def build_page(run: RunFiles) -> str:
    """The whole page, about 4.8 MB of it the plotting library."""
    from plotly.offline import get_plotlyjs

    figures = rl_figures(run.metrics)
    figures += build_figures(run.metrics, predicted_memory(run.report), run.loss_by_position)
    step_memory = memory_figure(run.profile.memory)
    name = escape(run_name(run))
    sections = [header(run), comparison_table(run.report.get("rows", [])), charts(figures)]
    sections.append(schedule_section(run.report))
    sections.append(profile_section(run.profile, chart(step_memory) if step_memory else ""))
    figures += [step_memory] if step_memory else []
    sections += [
        completions_section(run.completions),
        samples_section(run.samples),
        config_section(run.config_text),
        footer(run),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{name} – mew</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{"".join(sections)}
</main>
<script type="application/json" id="figures">{json_for_script([asdict(figure) for figure in figures])}</script>
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def json_for_script(value: Any) -> str:
    """JSON that cannot end its script element, whatever strings are in it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def run_name(run: RunFiles) -> str:
    return str(run.report.get("run", {}).get("name") or run.path.resolve().name)


def predicted_memory(report: dict[str, Any]) -> float | None:
    """The predicted peak in bytes, from the comparison's row on memory."""
    rows = [row for row in report.get("rows", []) if "memory" in row["quantity"] and row["unit"] == "bytes"]
    return rows[0]["predicted"] if rows else None


def header(run: RunFiles) -> str:
    """Name, state, where it ran, and the key figures."""
    facts = run.report.get("run", {})
    state = str(run.report.get("state", "unknown"))
    kind = "good" if state == "finished" else "warn" if state == "stopped" else ""
    told = [facts.get("device"), facts.get("torch") and f"torch {facts['torch']}"]
    told += [facts.get("commit") and f"commit {facts['commit']}", facts.get("started")]
    line = " · ".join(escape(str(fact)) for fact in told if fact)
    cards = "".join(
        f'<div class="card key"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value in key_figures(run)
    )
    return f"""<div class="title"><h1>{escape(run_name(run))}</h1><span class="pill {kind}">{escape(state)}</span></div>
<p class="facts">{line}</p>
<div class="keys">{cards}</div>
"""


def key_figures(run: RunFiles) -> list[tuple[str, str]]:
    """Label and value of the run's most important numbers; those that are not known are left out."""
    facts, validation = run.report.get("run", {}), run.validation
    figures = [
        ("validation loss (nats)", fixed(validation.get("loss"), 3)),
        ("bits per byte", fixed(validation.get("bits_per_byte"), 3)),
        ("perplexity", format_quantity(validation.get("perplexity"))),
        ("parameters", format_quantity(facts.get("parameters"))),
        ("steps", whole(run.last("step"))),
        ("tokens seen", format_quantity(run.last("tokens") or facts.get("tokens_seen"))),
        ("tokens / s", format_quantity(run.last("tokens_per_s"))),
        ("MFU", format_quantity(run.last("mfu"), "fraction")),
        ("peak memory", format_quantity(run.last("memory_bytes"), "bytes")),
        ("time", format_quantity(run.last("time_s"), "s")),
    ]
    return [(label, value) for label, value in figures if value != "–"]


def fixed(value: float | None, decimals: int) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{decimals}f}"


def whole(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def comparison_table(rows: list[dict[str, Any]]) -> str:
    """Quantity, predicted, measured, ratio, note."""
    if not rows:
        return ""
    body = "".join(
        f"<tr><td>{escape(row['quantity'])}</td>"
        f'<td class="number">{escape(format_quantity(row["predicted"], row["unit"]))}</td>'
        f'<td class="number">{escape(format_quantity(row["measured"], row["unit"]))}</td>'
        f'<td class="number">{ratio_cell(row["ratio"])}</td><td class="note">{escape(row["note"] or "")}</td></tr>'
        for row in rows
    )
    head = '<th>quantity</th><th class="number">predicted</th><th class="number">measured</th>'
    head += '<th class="number">ratio</th><th class="note">note</th>'
    return f"""<h2>Predicted and measured</h2>
<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
"""


def ratio_cell(ratio: float | None) -> str:
    """The ratio with a gauge from 1/2 to 2 whose shaded middle is 0.8 to 1.25."""
    within = is_within_bounds(ratio)
    if within is None:
        return "–"
    place = 50 + 50 * max(-1.0, min(1.0, math.log2(ratio))) if ratio > 0 else 0
    mark = "" if within else ' class="off"'
    return f'{format_ratio(ratio)}<span class="gauge"><i{mark} style="left:{place:.0f}%"></i></span>'


def charts(figures: list[Figure]) -> str:
    """A place for each figure; the page's script draws into it."""
    if not figures:
        return '<h2>Curves</h2><p class="caption">No metrics yet.</p>'
    return f'<h2>Curves</h2>\n<div class="charts">{"".join(chart(figure) for figure in figures)}</div>\n'


def chart(figure: Figure) -> str:
    switch = (
        f'<button data-figure="{figure.name}" aria-pressed="false">logarithmic steps</button>'
        if figure.log_x_switch
        else ""
    )
    return f"""<figure class="card chart{" wide" if figure.wide else ""}">
<header><div><h3>{escape(figure.title)}</h3><p class="caption">{escape(figure.caption)}</p></div>{switch}</header>
<div class="plot" id="plot-{figure.name}" role="img" aria-label="{escape(figure.title)}"></div>
</figure>
"""


def samples_section(samples: list[Sample]) -> str:
    """The newest samples, newest first."""
    if not samples:
        return ""
    shown = samples[: -SHOWN_SAMPLES - 1 : -1]
    body = "".join(
        f'<div class="card sample"><div class="caption">{escape(printable(sample.heading))}</div>'
        f"<pre>{escape(printable(sample.text))}</pre></div>\n"
        for sample in shown
    )
    return f'<h2>Samples</h2>\n<p class="caption">{len(shown)} of {len(samples)}, the newest first.</p>\n{body}'


def config_section(config_text: str) -> str:
    if not config_text:
        return ""
    return f"""<h2>Config</h2>
<details class="card"><summary>config.yaml, as resolved</summary><pre>{escape(config_text)}</pre></details>
"""


def footer(run: RunFiles) -> str:
    path = escape(str(run.path))
    return f"<footer>Made from the files in {path}; the directory is the record, this page a view.</footer>"
