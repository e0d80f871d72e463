"""The parts of report.html that only a run of reinforcement learning has: its curves, and a table of completions.

Completions are a model's text: escaped, with control characters made visible.
"""

from html import escape
from typing import Any

from configs.report_figures import Figure, Line, column, trace
from configs.report_samples import printable

FILE_NAME = "completions.jsonl"
SHOWN_COMPLETIONS = 24
SPLIT = (  # field, what it is called, a colour of the page
    ("rollout_s", "rollout", "memory-weights"),
    ("reward_s", "reward", "memory-backward"),
    ("log_prob_s", "log-probs", "memory-optimizer"),
    ("update_s", "update", "memory-gradients"),
    ("sync_s", "weights to the engine", "memory-activations"),
    ("wait_s", "waiting", "memory-other"),
)


def pair_figure(name: str, title: str, caption: str, y_title: str, fields: dict[str, str]) -> Any:
    """A figure builder of up to two fields, {field: label}."""

    def build(lines: list[Line]) -> Figure | None:
        colors = ("series-1", "series-2")
        traces = [
            trace(lines, field, label, color) for (field, label), color in zip(fields.items(), colors, strict=False)
        ]
        traces = [one for one in traces if one is not None]
        return Figure(name, title, caption, y_title, traces, from_zero=True) if traces else None

    return build


PAIRS = (
    pair_figure("reward", "Reward", "Of a batch's completions; form alone earns none.", "share",
                {"reward": "reward", "format_reward": "well formed"}),
    pair_figure("pass_at_1", "Held-out problems, sampled", "As in training.", "share", {"val_pass_at_1": "right"}),
    pair_figure("response", "Length of completions", "A mean over the batch.", "tokens",
                {"response_tokens": "tokens"}),
    pair_figure("entropy", "Entropy of the policy", "Over the vocabulary; near 0 nothing is explored.", "nats",
                {"entropy": "entropy"}),
    pair_figure("policy_kl", "Distance", "Mean |log p - log q| of trainer and sampler, and the KL to the reference.",
                "nats", {"sampler_mismatch": "sampler mismatch", "kl": "KL to the reference"}),
    pair_figure("informative", "Groups that teach", "With unequal rewards.", "share",
                {"informative_fraction": "of the batch"}),
)  # fmt: skip


def rl_figures(lines: list[Line]) -> list[Figure]:
    """Those that the run has data for; none for a run without rollouts."""
    if not any("rollout_s" in line for line in lines):
        return []
    return [figure for figure in (*(build(lines) for build in PAIRS), split_figure(lines)) if figure is not None]


def split_figure(lines: list[Line]) -> Figure | None:
    """Where a batch's time goes, stacked."""
    traces = []
    for field, label, color in SPLIT:
        steps, values = column(lines, field)
        if any(values):
            style = {"name": label, "color": color, "width": 1, "mode": "lines", "stack": True}
            traces.append({"x": steps, "y": values} | style)
    caption = "Seconds of a batch by part."
    return Figure("rl_time", "Where a batch's time goes", caption, "s", traces, wide=True) if traces else None


def completions_section(records: list[dict[str, Any]]) -> str:
    """The newest completions as a table; empty without any."""
    if not records:
        return ""
    shown = records[-SHOWN_COMPLETIONS:][::-1]
    head = "".join(f"<th>{name}</th>" for name in ("step", "question", "completion"))
    head += "".join(f'<th class="number">{name}</th>' for name in ("answer", "reward", "advantage", "tokens"))
    body = "".join(completion_row(record) for record in shown)
    return f"""<h2>Completions</h2>
<p class="caption">{len(shown)} of {len(records)} in {FILE_NAME}, the newest first.</p>
<div class="card scroll plain"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
"""


def completion_row(record: dict[str, Any]) -> str:
    """One completion; a record with fields missing is shown with what it has."""

    def text(name: str) -> str:
        return escape(printable(str(record.get(name, ""))))

    def number(name: str, form: str) -> str:
        value = record.get(name)
        return f'<td class="number">{format(value, form) if isinstance(value, int | float) else "–"}</td>'

    numbers = number("reward", ".2f") + number("advantage", "+.2f") + number("tokens", "d")
    return (
        f'<tr><td>{text("step")}</td><td class="note">{text("question")}</td><td class="note">{text("completion")}</td>'
        f'<td class="number">{text("answer")}</td>{numbers}</tr>'
    )
