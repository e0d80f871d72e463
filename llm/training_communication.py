"""What a run's steps sent, per axis of the mesh, apart from what validation, logging and checkpoints sent.

Lines go to comm.jsonl with the phase they belong to; sums over all steps of this process stand in report.json beside
the bytes that the cost model predicts, which must be equal.
"""

from dataclasses import asdict
from typing import Any

from llm.args import TrainConfig
from llm.plan_shapes import meta_params, predicted_traffic
from parallel.cost_model_pipeline import PIPELINE_WAITS
from parallel.mesh import Mesh

STEP, OTHER = "step", "other"
SUMMED = ("calls", "bytes", "seconds", "exposed_seconds")


def predict_communication(config: TrainConfig, mesh: Mesh) -> dict[str, dict[str, Any]]:
    """By axis: calls and bytes a step, and the messages behind them by operation and dtype."""
    if mesh.world_size == 1:
        return {}
    params = meta_params(config.model, config.optimizer.name, config.lora)
    accumulation = config.grad_accum_steps(mesh.size("dp"))
    axes: dict[str, dict[str, Any]] = {}
    for traffic in predicted_traffic(params, config, mesh.world_size, accumulation, mesh.rank):
        axis = axes.setdefault(traffic.axis, {"calls": 0, "bytes": 0, "messages": []})
        axis["calls"] += traffic.calls
        axis["bytes"] += traffic.bytes
        axis["messages"].append(asdict(traffic))
    return axes


class Communication:
    """Takes the mesh's log apart by phase: `take(STEP)` after steps, `take(OTHER)` after anything else."""

    def __init__(self, mesh: Mesh):
        self.log = mesh.log
        self.lines: list[dict[str, Any]] = []  # for comm.jsonl, not written yet
        self.sums: dict[str, dict[str, float]] = {}  # of all steps, by axis
        self.waited_s = 0.0  # for activations and gradients of other stages, in all steps
        self.steps = 0

    def take(self, phase: str, step: int) -> None:
        """Everything logged since the last call belongs to `phase`; waits for the device where something was sent."""
        for line in self.log.drain(step):
            self.lines.append(line | {"phase": phase})
            if phase == STEP:
                sums = self.sums.setdefault(line["axis"], dict.fromkeys(SUMMED, 0))
                for field in SUMMED:
                    sums[field] += line[field]
                if line["axis"] == "pp" and line["op"] in PIPELINE_WAITS:
                    self.waited_s += line["exposed_seconds"]

    def written(self) -> list[dict[str, Any]]:
        """The lines since the last call."""
        lines, self.lines = self.lines, []
        return lines

    def per_step(self) -> dict[str, dict[str, float]]:
        """By axis: calls, bytes, seconds and exposed_seconds of an average step."""
        if not self.steps:
            return {}
        return {axis: {field: sums[field] / self.steps for field in SUMMED} for axis, sums in self.sums.items()}

    def idle_s(self) -> float:
        """Seconds of an average step in which this rank waited for a neighbour of its pipeline."""
        return self.waited_s / self.steps if self.steps else 0.0


def communication_rows(predicted: dict[str, Any], measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the report's table for each axis: bytes a step, seconds a step, and those that nothing hid."""
    expected, seen = predicted.get("communication") or {}, measured.get("communication") or {}
    exposed, rows = predicted.get("exposed_by_axis_s") or {}, []
    if predicted.get("bubble") is not None:
        both = {key: said.get("bubble") for key, said in (("predicted", predicted), ("measured", measured))}
        note = f"{predicted['schedule']['name']}, {predicted['schedule']['micro_batches']} micro-batches; mean of ranks"
        row = {"quantity": "waiting for other stages", "unit": "fraction", **both, "note": note}
        rows.append(row | {"ratio": ratio_of(both["predicted"], both["measured"])})
    for axis in sorted(expected.keys() | seen.keys()):
        wanted, got = expected.get(axis, {}).get("bytes"), seen.get(axis, {})
        ratio = got["bytes"] / wanted if wanted and got else None
        row = {"quantity": f"sent over {axis}", "unit": "bytes", "predicted": wanted, "measured": got.get("bytes")}
        rows.append(row | {"ratio": ratio, "note": "a step, on one rank"})
        for name, field in (("time of it", "seconds"), ("exposed", "exposed_seconds")):
            said = exposed.get(axis) if name == "exposed" else None
            row = {"quantity": f"{name} ({axis})", "unit": "s", "predicted": said, "measured": got.get(field)}
            rows.append(row | {"ratio": ratio_of(said, got.get(field)), "note": "a step, waiting for peers included"})
    return rows


def ratio_of(predicted: float | None, measured: float | None) -> float | None:
    return measured / predicted if predicted and measured is not None else None
