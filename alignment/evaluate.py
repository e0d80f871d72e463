"""Evaluate a model on problems with known answers: accuracy, pass@k, maj@k, form and length, with intervals.

    python -m alignment.evaluate name=test run=runs/sft data.source=jsonl data.path=gsm8k/test.jsonl data.split=all
    python -m alignment.evaluate name=sums run=runs/sft data.level=mixed num_samples=8 temperature=1 'ks=[1,8]'

Writes runs/<name>/: config.yaml, answers.jsonl (a line for each response), report.json, report.html. The same command
goes on where a killed one stopped; under torchrun the ranks share the problems. `baseline=runs/other` compares with
another evaluation, problem by problem.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import MISSING, DictConfig
from rich.progress import Progress

from alignment.cost_model import device_of
from alignment.cost_model_rollout import Lengths, predict_rollout
from alignment.dataset import DatasetConfig, load_problems, without_repeats
from alignment.drgrpo_grader import RULES, Grader
from alignment.drgrpo_grader_extract import MODES
from alignment.evaluate_answers import Answer, Asking, Examinee, answer_all, read_answers
from alignment.evaluate_report import print_evaluation, write_evaluation_report
from alignment.evaluate_summary import Figure, against, by_source, summarise
from alignment.problem import Problem
from alignment.r1_prompt import PromptConfig, encode_prompts, load_prompt_format
from alignment.rollout import RolloutConfig, build_rollout_engine, close_engine
from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, config_to_yaml, run_script, start_script
from configs.run_dir import RunDir, read_json
from configs.version import git_commit
from llm.args import HardwareConfig, ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.hardware import detect_hardware
from llm.model_loading import load_model, resolve_checkpoint
from parallel.mesh import Mesh, close_mesh, init_mesh

TIMEOUT_S = 3_600.0  # a rank waits so long for the slowest engine's share of a batch


@dataclass
class AlignmentEvaluateConfig:
    """Everything that `python -m alignment.evaluate` takes."""

    name: str = MISSING
    runs_dir: str = "runs"
    run: str | None = None  # the model: a run directory (its newest checkpoint)
    checkpoint: str | None = None  # or one checkpoint's directory
    baseline: str | None = None  # the directory of another evaluation, to compare with
    data: DatasetConfig = MISSING
    prompt: PromptConfig = field(default_factory=PromptConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    num_samples: int = 1  # of each problem
    ks: list[int] = field(default_factory=lambda: [1])  # of pass@k and maj@k; at most num_samples
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1337
    stop_at_answer: bool = False  # end a response behind "</answer>": for base models, which do not stop by themselves
    requests_at_once: int = 512  # graded and written together
    mode: str | None = None  # how the answer is found: answer_tag, boxed, gsm8k, last_number; null: as the prompt asks
    rules: str = "exact"  # or drgrpo, the Dr. GRPO grader's verdicts
    grader_workers: int = 1  # processes for LaTeX that only a computer algebra system reads; 0: it counts as wrong
    device: str = "auto"

    def __post_init__(self) -> None:
        check_positive(num_samples=self.num_samples, max_new_tokens=self.max_new_tokens)
        check_positive(requests_at_once=self.requests_at_once)
        check_choice("rules", self.rules, RULES)
        if self.mode is not None:
            check_choice("mode", self.mode, MODES)
        for k in self.ks:
            if not 1 <= k <= self.num_samples:
                raise UserError(f"ks holds {k}: it must lie in 1..num_samples={self.num_samples}; raise num_samples")
        if self.num_samples > 1 and self.temperature == 0:
            raise UserError(f"num_samples={self.num_samples} at temperature=0 are all alike; set temperature=1")

    def asking(self) -> Asking:
        return Asking(
            self.num_samples, self.max_new_tokens, self.temperature, self.top_p, self.seed, self.stop_at_answer,
            self.requests_at_once,
        )  # fmt: skip


def run_evaluation(config: AlignmentEvaluateConfig) -> list[Figure]:
    """Ask, grade, summarise, and write the run directory; returns the figures on rank 0, nothing on the others."""
    mesh = init_mesh(config.device, TIMEOUT_S)
    try:
        path = resolve_checkpoint(config.run, config.checkpoint)
        # The checkpoint is part of the record: a run that trains on must not lend one evaluation two of them.
        run_dir = open_run(replace(config, run=None, checkpoint=str(path)), mesh.is_main)
        model, tokenizer, _ = load_model(path, mesh.device)
        fmt = load_prompt_format(config.prompt, tokenizer, path)
        drawn = load_problems(config.data)
        different = without_repeats(drawn)  # repeated questions would make the intervals too narrow
        problems, prompts, dropped = encode_prompts(different, fmt, tokenizer, model.config.max_seq_len - 1)
        longest = min(max(map(len, prompts)) + config.max_new_tokens, model.config.max_seq_len)
        engine = build_rollout_engine(config.rollout, model, tokenizer, mesh.device, longest)
        with Grader(config.mode or fmt.mode, config.rules, config.grader_workers) as grader:
            seconds, written = ask(Examinee(engine, prompts, fmt), problems, config, grader, run_dir, mesh)
        close_engine(engine)
    finally:
        close_mesh(mesh)
    if not mesh.is_main:
        return []
    facts = {
        "name": config.name, "checkpoint": str(path), "device": str(mesh.device), "ranks": mesh.world_size,
        "torch": torch.__version__, "commit": git_commit(), "problems": len(problems), "problems_too_long": dropped,
        "problems_repeated": len(drawn) - len(different),
    }  # fmt: skip
    rows = (
        [generation_row(model.config, tokenizer, read_answers(run_dir), config, mesh, (seconds, written))]
        if written
        else []
    )
    return conclude(config, run_dir, facts, rows)


def conclude(config: AlignmentEvaluateConfig, run_dir: RunDir, facts: dict[str, Any], rows: list[dict]) -> list[Figure]:
    """Figures from answers.jsonl, report.json, the page and the terminal's table."""
    answers = read_answers(run_dir)
    figures = summarise(answers, config.ks, config.seed)
    if config.baseline is not None:
        figures.append(compare(answers, config.baseline, config.seed))
    if not rows and (run_dir.path / "report.json").exists():  # all was answered before: what was measured then
        rows = read_json(run_dir.path / "report.json").get("rows", [])
    report = {
        "run": facts,
        "figures": [figure.fields() for figure in figures],
        "by_source": {source: figure.fields() for source, figure in by_source(answers, config.seed).items()},
        "rows": rows,
    }
    run_dir.write_json("report.json", report)
    print_evaluation(report, write_evaluation_report(run_dir, report, answers))
    return figures


def open_run(config: AlignmentEvaluateConfig, writes: bool) -> RunDir:
    """The run directory, new or begun with the same config; UserError when it holds anything else.

    Every rank looks, so that none is left waiting for one that was refused; the one that `writes` makes it.
    """
    run_dir = RunDir(Path(config.runs_dir) / config.name)
    text, path = config_to_yaml(config), run_dir.path / "config.yaml"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{run_dir.path} holds a run with another config or checkpoint; give another name")
    if writes:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        run_dir.write_text("config.yaml", text)
    return run_dir


def ask(
    examinee: Examinee,
    problems: list[Problem],
    config: AlignmentEvaluateConfig,
    grader: Grader,
    run_dir: RunDir,
    mesh: Mesh,
) -> tuple[float, int]:
    """Fill answers.jsonl, with a progress bar; returns the engines' seconds and the responses made in this call."""
    total, seconds, written = len(problems) * config.num_samples, 0.0, 0
    with Progress(disable=not mesh.is_main) as progress:
        task = progress.add_task("answering", total=total)
        for count, took in answer_all(examinee, problems, config.asking(), grader, run_dir, mesh):
            seconds, written = seconds + took, written + count
            progress.update(task, advance=count)
        progress.update(task, completed=total)
    return seconds, written


def compare(answers: list[list[Answer]], baseline: str, seed: int) -> Figure:
    other = read_answers(RunDir(baseline))
    if not {one[0].id for one in answers} & {one[0].id for one in other}:
        raise UserError(
            f"baseline={baseline} has answers to none of these problems; give an evaluation of the same data"
        )
    return against(answers, other, seed)


def generation_row(
    model: ModelConfig,
    tokenizer: Tokenizer,
    answers: list[list[Answer]],
    config: AlignmentEvaluateConfig,
    mesh: Mesh,
    measured: tuple[float, int],
) -> dict[str, Any]:
    """The engine's time beside what the cost model says of the same prompts and lengths, batch by batch.

    measured: seconds, and the responses made in them.
    """
    seconds, written = measured
    hardware = detect_hardware(HardwareConfig(), mesh.device)
    made = [one for samples in answers for one in samples][-written:]
    predicted, device = 0.0, device_of(hardware, config.rollout, tokenizer)
    for first in range(0, len(made), config.requests_at_once * mesh.world_size):
        share = made[first : first + config.requests_at_once * mesh.world_size][:: mesh.world_size]  # a rank's
        tokens = [(one.prompt_tokens, one.tokens) for one in share]
        lengths = Lengths(*zip(*tokens, strict=True), group=len(answers[0]))
        predicted += predict_rollout(len(share), config.rollout, model, device, lengths)
    return {
        "quantity": "generation", "unit": "s", "predicted": predicted, "measured": seconds,
        "ratio": seconds / predicted if predicted else None,
        "note": f"the lengths are those seen; {written:,} responses, {mesh.world_size} ranks",
    }  # fmt: skip


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="alignment_evaluate")
def main(config: DictConfig) -> None:
    run_script(run_evaluation, AlignmentEvaluateConfig, config)


if __name__ == "__main__":
    start_script(main, AlignmentEvaluateConfig, "alignment_evaluate")
