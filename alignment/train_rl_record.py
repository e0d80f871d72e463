"""What a run of train_rl leaves behind: a line of metrics.jsonl a batch, completions.jsonl, report.json and the page.

Field names are fixed in docs/notation.md. Seconds are rank 0's, those of the rollouts of the rank that wrote them;
tokens are of all ranks.
"""

from typing import Any

from alignment.train_rl_collect import Collected
from alignment.train_rl_evaluate import HeldOut
from alignment.train_rl_learn import Learned
from alignment.train_rl_samples import Group, Sample
from alignment.train_rl_setup import RlRun
from configs.report_samples import printable
from llm.metrics import comparison_rows
from llm.training_record import Record

COMPLETIONS = "completions.jsonl"


class RlRecord(Record):
    """llm's record of a run, with the rows that only reinforcement learning has."""

    def __init__(self, run: RlRun):
        super().__init__(run.run_dir, run.config, run.is_main)
        self.run = run
        self.totals: dict[str, float] = {}  # of this process, the first batch left out

    def begin(self, prediction: dict[str, Any]) -> None:
        """The prediction on disk before the first batch."""
        run, side = self.run, self.run.training
        if not self.is_writer:
            return
        facts = {
            "device": run.hardware.description,
            "world_size": run.roles.world.world_size,
            "rollout_ranks": run.config.rollout_ranks,
            "dtype": run.config.dtype,
            "parameters": sum(parameter.numel() for parameter in side.model.parameters()),
            "init_from": run.config.init_from,
            "tokenizer_sha256": run.tokenizer.sha256,
        }
        predicted = {"parameters": facts["parameters"]} | prediction
        self.measure(parameters=facts["parameters"])
        self.open(run.step, facts, predicted)
        self.run_dir.drop_lines_after(COMPLETIONS, run.step)

    def rows(self) -> list[dict[str, Any]]:
        """The usual comparison, and the split of a batch's time."""
        both = self.report["predicted"], self.report["measured"]
        parameters = [row for row in comparison_rows(*both) if row["quantity"] == "parameters"]
        return parameters + [split_row(name, label, unit, *both) for name, label, unit in SPLIT]

    def batch(self, collected: Collected, learned: Learned, seconds: dict[str, float]) -> dict[str, Any]:
        """The line of a learned batch; returns its fields. Every training rank calls it: losses are reduced."""
        side = self.run.training
        losses = [result.mean_losses(side.mesh)[0] for result in learned.results]
        if not self.is_writer:
            return {}
        fields = {"batch": self.run.batch, "loss": sum(losses) / len(losses)}
        fields |= reward_fields(collected) | learned_fields(learned) | time_fields(collected, learned, seconds)
        fields |= {"tokens": self.run.tokens, "staleness": self.run.batch - 1 - collected.groups[0].version}
        fields["skipped_steps"] = side.learner.training_step.skipped_steps
        self.line(self.run.step, **fields)
        self.completions(collected, learned)
        self.count(fields)
        return fields

    def completions(self, collected: Collected, learned: Learned) -> None:
        """Some completions of a batch, spread over its groups, with what they earned."""
        samples = [(group, one) for group in collected.groups for one in group.samples]
        stride = max(1, len(samples) // max(1, self.run.config.log_completions))
        chosen = range(0, len(samples), stride)[: self.run.config.log_completions]
        records = [completion_record(*samples[index], learned.advantages[index]) for index in chosen]
        place = {"step": self.run.step, "batch": self.run.batch}
        records = [place | record for record in records]
        self.run_dir.append_jsonl(COMPLETIONS, records)

    def count(self, fields: dict[str, Any]) -> None:
        """Averages for report.json; the first batch of a process touches memory and compiles, and is left out."""
        if "batches" not in self.totals:
            self.totals["batches"] = 0
            return
        self.totals["batches"] += 1
        for name, _, _ in SPLIT:
            self.totals[name] = self.totals.get(name, 0.0) + (fields.get(name) or 0.0)
        means = {name: self.totals[name] / self.totals["batches"] for name, _, _ in SPLIT}
        means["rollout_share"] = means["rollout_s"] / max(means["step_time_s"], 1e-9)
        self.measure(**means)

    def held_out(self, result: HeldOut) -> None:
        if self.is_writer:
            fields = result.fields()
            self.line(self.run.step, **fields)
            self.report.setdefault("held_out", []).append({"step": self.run.step, **fields})


SPLIT = (  # field, what it is called, unit
    ("rollout_s", "rollout", "s"),
    ("reward_s", "reward", "s"),
    ("log_prob_s", "log-probs", "s"),
    ("update_s", "update", "s"),
    ("sync_s", "weights to the engine", "s"),
    ("step_time_s", "batch", "s"),
    ("rollout_share", "rollout share", "fraction"),
)


def split_row(name: str, label: str, unit: str, predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    expected, seen = predicted.get(name), measured.get(name)
    ratio = seen / expected if expected and seen is not None else None
    note = predicted.get("notes", {}).get(name, "")
    return {"quantity": label, "unit": unit, "predicted": expected, "measured": seen, "ratio": ratio, "note": note}


def completion_record(group: Group, sample: Sample, advantage: float) -> dict[str, Any]:
    """One line of completions.jsonl; the text is the model's, control characters made visible."""
    return {
        "problem": group.problem_id, "question": group.question, "answer": group.answer,
        "completion": printable(sample.text), "tokens": len(sample.token_ids), "finish_reason": sample.finish_reason,
        "reward": sample.reward, "format_reward": sample.format_reward, "answer_reward": sample.answer_reward,
        "advantage": advantage, "version": group.version,
    }  # fmt: skip


def reward_fields(collected: Collected) -> dict[str, float]:
    """Of the batch's completions: rewards, length, and how many groups said something."""
    samples = [one for group in collected.groups for one in group.samples]
    count = max(len(samples), 1)
    return {
        "reward": sum(one.reward for one in samples) / count,
        "answer_reward": sum(one.answer_reward for one in samples) / count,
        "format_reward": sum(one.format_reward for one in samples) / count,
        "response_tokens": sum(len(one.token_ids) for one in samples) / count,
        "cut_fraction": sum(one.is_cut for one in samples) / count,
        "informative_fraction": sum(group.is_informative for group in collected.groups) / len(collected.groups),
        "tries": collected.tries,
    }


def learned_fields(learned: Learned) -> dict[str, Any]:
    """The policy's means over sampled tokens, and the last update's rate and the largest gradient norm."""
    renamed = {"negative_log_prob": "nll", "tokens": "target_tokens"}
    metrics = {renamed.get(name, name): value for name, value in learned.metrics.items()}
    last = learned.results[-1]
    return metrics | {"lr": last.learning_rate, "grad_norm": max(one.gradient_norm for one in learned.results)}


def time_fields(collected: Collected, learned: Learned, seconds: dict[str, float]) -> dict[str, float]:
    """Seconds and tokens of each part of a batch."""
    total = seconds["total"]
    return {
        "rollout_s": collected.rollout_s, "reward_s": collected.reward_s, "log_prob_s": seconds["log_prob"],
        "update_s": seconds["update"], "sync_s": seconds["sync"], "wait_s": seconds["wait"], "step_time_s": total,
        "rollout_share": collected.rollout_s / max(total, 1e-9), "rollout_tokens": collected.rollout_tokens,
        "prompt_tokens": collected.prompt_tokens,
        "tokens_per_s": (collected.rollout_tokens + collected.prompt_tokens) / max(total, 1e-9),
    }  # fmt: skip
