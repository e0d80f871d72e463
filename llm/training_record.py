"""What a run leaves behind: metrics.jsonl, comm.jsonl, report.json and report.html, written by rank 0 alone.

The prediction is written before step 1; measurements join it as they come, each with its ratio.
"""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from configs.loader import config_to_yaml
from configs.report import write_report
from configs.run_dir import RunDir, read_jsonl
from configs.version import git_commit
from llm.args import TrainConfig
from llm.evaluation import Evaluation
from llm.metrics import Tracker, comparison_rows
from llm.training_communication import communication_rows


class Record:
    """Writes the run directory on rank 0; on other ranks every method does nothing."""

    def __init__(self, run_dir: RunDir, config: TrainConfig, is_writer: bool):
        self.run_dir, self.config, self.is_writer = run_dir, config, is_writer
        self.start_s = time.perf_counter()
        self.report: dict[str, Any] = {"run": {}, "predicted": {}, "measured": {}, "rows": [], "validation": None}
        self.tracker: Tracker | None = None

    def open(self, step: int, facts: dict[str, Any], predicted: dict[str, Any]) -> None:
        """Start or continue the record at optimizer step `step`, with the prediction in report.json."""
        if not self.is_writer:
            return
        self.run_dir.create()
        self.run_dir.write_text("config.yaml", config_to_yaml(self.config))
        self.run_dir.drop_lines_after("metrics.jsonl", step)
        self.run_dir.drop_lines_after("comm.jsonl", step)
        earlier = [line["time_s"] for line in read_jsonl(self.run_dir.path / "metrics.jsonl")]
        self.start_s -= max(earlier, default=0.0)  # time_s goes on where the killed run stopped
        self.report["run"] = {
            "name": self.config.name,
            "commit": git_commit(),
            "torch": torch.__version__,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "resumed_at_step": step or None,
            **facts,
        }
        self.report["predicted"] = predicted
        self.write_report("running")
        self.tracker = Tracker(self.config.tracking, self.config.name, asdict(self.config), self.run_dir.path)

    def line(self, step: int, **fields: Any) -> None:
        """One line of metrics.jsonl, and of W&B when it is on."""
        if self.is_writer:
            record = {"step": step, **fields, "time_s": round(time.perf_counter() - self.start_s, 3)}
            self.run_dir.append_jsonl("metrics.jsonl", [record])
            self.tracker.log(record)

    def communication(self, lines: list[dict[str, Any]]) -> None:
        if self.is_writer and lines:
            self.run_dir.append_jsonl("comm.jsonl", lines)

    def validation(self, step: int, result: Evaluation) -> None:
        self.line(
            step,
            val_loss=result.loss,
            val_bits_per_byte=result.bits_per_byte,
            val_perplexity=result.perplexity,
        )
        self.report["validation"] = {
            "step": step,
            "loss": result.loss,
            "bits_per_byte": result.bits_per_byte,
            "perplexity": result.perplexity,
            "loss_by_position": result.loss_by_position,
        }

    def task(self, step: int, fields: dict[str, Any]) -> None:
        """What a task measures at a validation: a line, and in the report the last of them."""
        self.line(step, **fields)
        self.report["task"] = {"step": step, **fields}

    def measure(self, **fields: Any) -> None:
        self.report["measured"].update(fields)

    def write_report(self, state: str) -> None:
        """report.json with the comparison rows; the page too once there is something to draw."""
        if not self.is_writer:
            return
        self.report["state"] = state
        self.report["rows"] = self.rows()
        self.run_dir.write_json("report.json", self.report)
        if self.report["measured"]:
            write_report(self.run_dir.path)

    def rows(self) -> list[dict[str, Any]]:
        """Predicted beside measured."""
        both = self.report["predicted"], self.report["measured"]
        return comparison_rows(*both) + communication_rows(*both)

    def close(self, state: str) -> None:
        self.write_report(state)
        if self.tracker is not None:
            self.tracker.finish()
