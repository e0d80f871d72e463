"""A plan's memory as a picture: for the best layout of each kind, what lies on a GPU, and the predicted peak."""

from pathlib import Path

from matplotlib.figure import Figure

from llm.plan_layouts import PlanRow

GB = 1e9
PARTS = ("weights", "optimizer state", "gradients", "gathered parameters", "activations and logits")
COLOURS = ("#33658a", "#86bbd8", "#758e4f", "#f6ae2d", "#f26419")


def parts_of(row: PlanRow) -> list[float]:
    """Bytes by part; they are not all there at once, so that their sum is above the peak."""
    state, memory = row.memory.state, row.memory
    blocks = sum(state.gathered_blocks) if row.choice.zero == 2 else 2 * max(state.gathered_blocks, default=0)
    gathered = state.gathered_root + blocks + (state.gather_message if row.choice.zero == 3 else 0)
    activations = memory.activations_bytes + memory.logits_bytes
    gradients = max(state.gradients, state.waiting) + state.peer
    return [state.weights, state.optimizer, gradients, gathered, activations]


def draw_memory(path: str | Path, rows: list[PlanRow], limit_bytes: float, title: str) -> None:
    """Write a PNG with one bar a layout."""
    figure = Figure(figsize=(9, 1.4 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.name}\n{row.choice.micro_batch_size} x {row.micro_batches}, checkpointing "
             f"{row.choice.checkpointing}" for row in rows]  # fmt: skip
    lefts = [0.0] * len(rows)
    for index, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        widths = [parts_of(row)[index] / GB for row in rows]
        axes.barh(names, widths, left=lefts, color=colour, label=part, height=0.6)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, row in enumerate(rows):
        peak = row.memory.peak_bytes / GB
        axes.plot([peak, peak], [place - 0.38, place + 0.38], color="black", linewidth=2,
                  label="predicted peak" if place == 0 else None)  # fmt: skip
    axes.axvline(limit_bytes / GB, color="crimson", linestyle="--", label="memory limit")
    axes.invert_yaxis()
    axes.set_xlabel("GB on one GPU")
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="y", labelsize=8)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
