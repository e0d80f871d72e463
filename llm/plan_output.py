"""A plan as a table on the terminal, as one JSON line, and as plan.json and plan.html in a directory."""

import html
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.run_dir import write_json_atomic, write_text_atomic
from llm.plan_layouts import Planner, PlanRow, best_of_each_kind
from llm.plan_reason import why

GB = 1e9
HEADER = ("layout", "batch x accum", "checkpointing", "memory GB", "largest phase", "sent GB by axis", "step s",
          "exposed s", "idle s", "tokens/s/GPU", "MFU", "bound")  # fmt: skip


def cells(row: PlanRow, world_size: int) -> tuple[str, ...]:
    """The columns of one layout."""
    sent = " ".join(f"{axis}:{value / GB:.1f}" for axis, value in row.axis_bytes.items() if value >= GB / 20)
    return (
        row.name, f"{row.choice.micro_batch_size} x {row.micro_batches}", row.choice.checkpointing,
        f"{row.memory.peak_bytes / GB:.1f}", row.memory.phase, sent or "0", f"{row.step_s:.3f}",
        f"{row.exposed_s:.3f}", f"{row.idle_s:.3f}" if row.choice.pp > 1 else "",
        f"{row.tokens_per_s / world_size:.0f}", f"{100 * row.mfu:.1f}%", row.bound,
    )  # fmt: skip


def table(rows: list[PlanRow], world_size: int) -> list[str]:
    """Lines of text in columns."""
    body = [HEADER, *(cells(row, world_size) for row in rows)]
    widths = [max(len(line[column]) for line in body) for column in range(len(HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in body]


def print_plan(planner: Planner, rows: list[PlanRow], dry_runs: list[dict[str, Any]]) -> None:
    """The ranked table, what does not fit, what was left out, and what the dry runs said."""
    config, hardware = planner.config, planner.config.hardware
    fitting = [row for row in rows if planner.fits(row)]
    others = [row for row in rows if not planner.fits(row)]
    parameters = sum(param.numel for param in planner.params)
    print(
        f"{parameters / 1e9:.2f}B parameters on {config.world_size} x {hardware.name} ({config.nodes} nodes of "
        f"{config.node_size}), {config.global_batch_tokens} tokens a step of {config.seq_len}, {config.dtype}, "
        f"{config.optimizer.name}, compile={config.compile}"
    )
    print(f"memory limit {planner.limit_bytes / GB:.1f} GB a GPU ({config.memory_share:.0%} of it)")
    if fitting:
        print("\n".join(table(fitting[: config.rows], config.world_size)))
        if len(fitting) > config.rows:
            print(f"and {len(fitting) - config.rows} more that fit (rows={len(fitting)} shows them)")
    else:
        print("no layout fits; use more nodes, checkpointing=[full], a smaller micro_batch_size or a larger dp_shard")
    if others:
        print(f"too large ({planner.too_large}), the smallest first:")
        print("\n".join(table(others[: config.rows // 3 + 1], config.world_size)[1:]))
    for sentence in why(fitting, others, planner.limit_bytes):
        print(f"why: {sentence}")
    for what, reason in planner.refused.items():
        print(f"left out: {what}: {reason}")
    for run in dry_runs:
        said = "as predicted" if run["equal"] else f"NOT as predicted: {run['difference']}"
        print(f"dry run of {run['layout']} as rank 0 of {config.world_size}: {run['collectives']} collectives, {said}")


def document(planner: Planner, rows: list[PlanRow], dry_runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan as one JSON document, quickest layout first."""
    config = planner.config
    return {
        "plan": {
            "parameters": sum(param.numel for param in planner.params), "hardware": config.hardware.name,
            "nodes": config.nodes, "gpus": config.world_size, "seq_len": config.seq_len, "dtype": config.dtype,
            "global_batch_tokens": config.global_batch_tokens, "optimizer": config.optimizer.name,
            "compile": config.compile, "memory_limit_bytes": planner.limit_bytes,
        },
        "layouts": [
            {
                "layout": row.name, "fits": planner.fits(row), **asdict(row.choice),
                "micro_batches": row.micro_batches, "memory_bytes": row.memory.peak_bytes,
                "memory_phases_bytes": row.memory.phases_bytes, "sent_bytes": row.axis_bytes, "step_s": row.step_s,
                "exposed_s": row.exposed_s, "idle_s": row.idle_s, "tokens_per_s": row.tokens_per_s, "mfu": row.mfu,
                "bound": row.bound,
            }
            for row in rows
        ],
        "why": why([row for row in rows if planner.fits(row)], [row for row in rows if not planner.fits(row)],
                   planner.limit_bytes),
        "left_out": planner.refused,
        "dry_runs": dry_runs,
        "sources": {"device": config.hardware.source, "links": config.hardware.link_source},
    }  # fmt: skip


def write_plan(directory: str | Path, planner: Planner, rows: list[PlanRow], plan: dict[str, Any]) -> None:
    """plan.json, memory.png, and plan.html with the whole table."""
    from llm.plan_figure import draw_memory  # brings matplotlib

    write_json_atomic(Path(directory) / "plan.json", plan)
    lines = [cells(row, planner.config.world_size) for row in rows]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADER)
    body = "".join(
        f"<tr class={'fits' if planner.fits(row) else 'large'}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in line)
        + "</tr>\n"
        for row, line in zip(rows, lines, strict=True)
    )
    facts = html.escape(", ".join(f"{key} {value}" for key, value in plan["plan"].items()))
    sources = "".join(f"<li>{html.escape(str(text))}</li>" for text in plan["sources"].values())
    reasons = "<br>".join(map(html.escape, plan["why"]))
    config = planner.config
    title = f"{plan['plan']['parameters'] / 1e9:.1f}B parameters on {config.world_size} {config.hardware.name}"
    kinds = best_of_each_kind(rows)[: config.rows]
    draw_memory(Path(directory) / "memory.png", kinds, planner.limit_bytes, title)
    style = "body{font:15px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}.large{color:#999}"
    write_text_atomic(
        Path(directory) / "plan.html",
        f"<!doctype html><meta charset=utf-8><title>plan</title><style>{style}</style><h1>Plan</h1><p>{facts}</p>"
        f"<p>Quickest first; grey layouts need more than {planner.limit_bytes / GB:.1f} GB.</p>"
        f"<p>{reasons}</p><p><img src=memory.png alt='memory by layout'></p><table><tr>{head}</tr>\n{body}</table>"
        f"<p>Figures of the device and its links:</p><ul>{sources}</ul>\n",
    )
