"""Schedules to look at: as text, a line a rank, and as a drawing, a bar an operation.

python -m parallel.pipeline_schedules_figure 4 8             # ranks, micro-batches
python -m parallel.pipeline_schedules_figure 4 8 docs/images/pipeline_schedules.png
"""

import sys

from parallel.pipeline_schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, build_schedule
from parallel.pipeline_schedules_simulation import Simulation, simulate

COLOURS = {FORWARD: "#8fb8de", BACKWARD: "#e2a76f", INPUT: "#e2a76f", WEIGHT: "#a8c686"}
MEANING = {FORWARD: "forward", INPUT: "backward (zero-bubble: of the input)", WEIGHT: "backward of the weights"}


def as_text(simulation: Simulation) -> str:
    """A line a rank, a column a unit of time: kind and micro-batch, + where an operation goes on, . where idle."""
    schedule = simulation.schedule
    width = len(str(schedule.micro_batches - 1)) + 1 + (schedule.chunks > 1)
    lines = []
    for rank, row in enumerate(schedule.table):
        cells = ["." * width] * round(simulation.total)
        for op in row:
            start, end = (round(time) for time in simulation.times[op])
            chunk = chr(ord("a") + op.stage // schedule.ranks) if schedule.chunks > 1 else ""
            cells[start:end] = [f"{op.kind}{op.micro_batch}{chunk}".ljust(width)] + ["+" * width] * (end - start - 1)
        lines.append(f"rank {rank}  " + " ".join(cells))
    return "\n".join(lines)


def summary(simulation: Simulation) -> str:
    schedule = simulation.schedule
    chunks = f", {schedule.chunks} stages a rank" if schedule.chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.ranks} ranks{chunks}, {schedule.micro_batches} micro-batches, "
        f"bubble {simulation.bubble:.1%}, most held on a rank {max(simulation.peak)}"
    )


def draw(simulations: list[Simulation], path: str) -> None:
    """One panel a schedule on a common time axis; time in units of one forward through a whole rank."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 2.1 * len(simulations) + 0.6), layout="constrained")
    panels = figure.subplots(len(simulations), 1, sharex=True, squeeze=False)[:, 0]
    for panel, simulation in zip(panels, simulations, strict=True):
        draw_panel(panel, simulation)
    panels[-1].set_xlabel("time, in forward passes of one micro-batch through a rank")
    handles = [Patch(facecolor=COLOURS[kind], edgecolor="black", label=text) for kind, text in MEANING.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)


def draw_panel(panel, simulation: Simulation) -> None:
    schedule, unit = simulation.schedule, simulation.schedule.chunks
    for rank, row in enumerate(schedule.table):
        for op in row:
            start, end = (time / unit for time in simulation.times[op])
            hatch = "////" if op.stage >= schedule.ranks else None
            panel.barh(rank, end - start, left=start, height=0.9, color=COLOURS[op.kind], edgecolor="black",
                       linewidth=0.5, hatch=hatch, alpha=0.75 if hatch else 1.0)  # fmt: skip
            panel.text((start + end) / 2, rank, str(op.micro_batch), ha="center", va="center", fontsize=7)
    panel.invert_yaxis()
    panel.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    panel.set_title(summary(simulation), fontsize=9, loc="left")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def all_schedules(ranks: int, micro_batches: int) -> list[Schedule]:
    kinds = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble_h2", 1))
    return [build_schedule(name, ranks, micro_batches, chunks) for name, chunks in kinds]


def main(arguments: list[str]) -> None:
    ranks, micro_batches = (int(number) for number in arguments[:2])
    simulations = [simulate(schedule) for schedule in all_schedules(ranks, micro_batches)]
    for simulation in simulations:
        print(summary(simulation), as_text(simulation), sep="\n")
    if len(arguments) > 2:
        draw(simulations, arguments[2])


if __name__ == "__main__":
    main(sys.argv[1:])
