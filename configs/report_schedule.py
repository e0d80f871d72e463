"""A pipeline's schedule as predicted before step 1, drawn into the page as SVG: a row a rank, a bar an operation.

The table and its times stand in report.json; times are the cost model's, of each stage's own work. Bars of stages on
the same rank differ by their outline; where nothing is drawn the rank is predicted to wait.
"""

from html import escape
from typing import Any

COLOURS = {"F": "series-1", "B": "series-2", "I": "series-2", "W": "memory-activations"}
MEANING = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
WIDTH, ROW, BAR, LEFT = 1040, 30, 22, 56  # of the drawing, in its own units
MOST_BARS = 1500  # a longer step is drawn up to there
LEAST_LABEL = 14  # bars as wide get the micro-batch's number


def schedule_section(report: dict[str, Any]) -> str:
    """The drawing with its caption; nothing for a run without a pipeline."""
    schedule = report.get("predicted", {}).get("schedule")
    if not schedule:
        return ""
    caption = (
        f"{schedule['name']}, {schedule['ranks']} ranks, {schedule['micro_batches']} micro-batches, as predicted: "
        f"{schedule['seconds'] * 1e3:.1f} ms until the last operation ends. {told_of_idle(report)}"
    )
    return f"""<h2>Pipeline</h2>
<figure class="card chart wide"><header><div><h3>Schedule</h3><p class="caption">{escape(caption)}</p></div></header>
{drawing(schedule)}
{legend(schedule)}</figure>
"""


def told_of_idle(report: dict[str, Any]) -> str:
    """Predicted and measured share of a step in which a rank waits for others, on average."""
    predicted, measured = (report.get(kind, {}).get("bubble") for kind in ("predicted", "measured"))
    told = f"A rank is predicted to wait {predicted:.1%} of a step" if predicted is not None else ""
    return told + (f" and was seen to wait {measured:.1%}." if measured is not None else ".")


def drawing(schedule: dict[str, Any]) -> str:
    """The bars; operations are (kind, stage, micro-batch, start, end)."""
    rows = schedule["rows"]
    shown = max(1, MOST_BARS // len(rows))
    end = max(op[4] for row in rows for op in row[:shown])
    scale = (WIDTH - LEFT) / end
    parts = []
    for rank, row in enumerate(rows):
        top = rank * ROW + (ROW - BAR) / 2
        parts.append(f'<text x="0" y="{top + BAR / 2 + 4:.1f}" fill="var(--muted)" font-size="12">rank {rank}</text>')
        parts += [bar(op, top, scale, schedule["ranks"]) for op in row[:shown]]
    height = ROW * len(rows)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="pipeline schedule" '
        f'style="display:block;margin:8px 0">{"".join(parts)}</svg>'
    )


def bar(op: list[Any], top: float, scale: float, ranks: int) -> str:
    kind, stage, micro_batch, start, end = op
    x, width = LEFT + start * scale, max(0.5, (end - start) * scale)
    fade = 1.0 if stage < ranks else 0.6  # a rank's second and later stages
    told = f"{MEANING[kind]}, stage {stage}, micro-batch {micro_batch}: {1e3 * start:.2f} to {1e3 * end:.2f} ms"
    label = ""
    if width >= LEAST_LABEL:
        label = (
            f'<text x="{x + width / 2:.1f}" y="{top + BAR / 2 + 4:.1f}" text-anchor="middle" font-size="11" '
            f'fill="var(--card)">{micro_batch}</text>'
        )
    return (
        f'<g><title>{escape(told)}</title><rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}" '
        f'fill="var(--{COLOURS[kind]})" fill-opacity="{fade}" stroke="var(--card)"/>{label}</g>'
    )


def legend(schedule: dict[str, Any]) -> str:
    kinds = sorted({op[0] for row in schedule["rows"] for op in row}, key="FBIW".index)
    items = "".join(
        f'<span style="margin-right:18px"><i style="display:inline-block;width:10px;height:10px;border-radius:2px;'
        f'margin-right:6px;background:var(--{COLOURS[kind]})"></i>{MEANING[kind]}</span>'
        for kind in kinds
    )
    return f'<p class="caption" style="padding-bottom:10px">{items}</p>'
