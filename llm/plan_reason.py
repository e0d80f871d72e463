"""Why a plan's best layout is best: what it spends, and what the best of every other kind would spend more."""

from collections.abc import Callable

from llm.plan_layouts import PlanRow

GB = 1e9
KINDS: dict[str, Callable[[PlanRow], bool]] = {
    "zero=0": lambda row: row.choice.shared == 1 and row.choice.zero == 0,
    "zero=1": lambda row: row.choice.shared == 1 and row.choice.zero == 1,
    "zero=2": lambda row: row.choice.shared == 1 and row.choice.zero == 2,
    "zero=3": lambda row: row.choice.shared == 1 and row.choice.zero == 3,
    "tp": lambda row: row.choice.tp > 1 and row.choice.pp == row.choice.cp == 1,
    "pp": lambda row: row.choice.pp > 1 and row.choice.tp == row.choice.cp == 1,
    "cp": lambda row: row.choice.cp > 1 and row.choice.tp == row.choice.pp == 1,
    "a product": lambda row: sum(degree > 1 for degree in (row.choice.tp, row.choice.pp, row.choice.cp)) > 1,
}


def why(fitting: list[PlanRow], others: list[PlanRow], limit_bytes: float) -> list[str]:
    """Sentences: of the best layout what its step is made of, of every other kind what speaks against it."""
    if not fitting:
        return []
    best = fitting[0]
    busy = best.step_s - best.exposed_s - best.idle_s
    said = [
        f"{best.name} with micro-batches of {best.choice.micro_batch_size} is best: of {best.step_s:.3f} s the device "
        f"works {busy:.3f} s, waits {best.exposed_s:.3f} s for messages{idle_of(best)}; it needs "
        f"{best.memory.peak_bytes / GB:.1f} of {limit_bytes / GB:.1f} GB"
    ]
    for kind, is_kind in KINDS.items():
        if is_kind(best):
            continue
        row = next((row for row in fitting if is_kind(row)), None)
        if row is not None:
            said.append(f"{kind}: {against(row, best)}")
            continue
        row = min((row for row in others if is_kind(row)), key=lambda row: row.memory.peak_bytes, default=None)
        if row is not None:
            said.append(f"{kind}: does not fit, {row.name} needs {row.memory.peak_bytes / GB:.1f} GB")
    return said


def idle_of(row: PlanRow) -> str:
    return f" and {row.idle_s:.3f} s for other stages" if row.choice.pp > 1 else ""


def against(row: PlanRow, best: PlanRow) -> str:
    """The largest of the differences in what a step is made of."""
    work = [other.step_s - other.exposed_s - other.idle_s for other in (row, best)]
    more = {
        "more work on the device": work[0] - work[1],
        "more waiting for messages": row.exposed_s - best.exposed_s,
        "more waiting for other stages": row.idle_s - best.idle_s,
    }
    what = max(more, key=more.__getitem__)
    slower = row.step_s / best.step_s - 1
    return f"{row.name} would take {row.step_s:.3f} s ({slower:+.1%}), mostly by {more[what]:.3f} s {what}"
