"""The commands of the reinforcement-learning benchmark: fine-tuning, GRPO and evaluations as a user would type them.

Every run is a process of its own, several at once, dealt over the given GPUs in turn. All of them answer the same
held-out problems, which are written once as a jsonl file without repeats.
"""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from alignment.dataset import DatasetConfig, load_problems, problem_record, without_repeats
from configs.run_dir import RunDir

LONG_NEW_TOKENS = 256  # a chat model that was not fine-tuned talks before it answers, and GSM8K needs more lines
EVALUATED_SAMPLES = 8  # of each problem, for pass@1 and pass@8


@dataclass
class Plan:
    """Sizes of the whole; times are caps, so that it ends whatever the machine does."""

    out: Path
    work: Path  # runs with their weights
    base: str | None
    level: str = "word_problems"
    seeds: tuple[int, ...] = (1, 2, 3)
    algorithms: tuple[str, ...] = ("grpo", "dr_grpo")
    groups: tuple[int, ...] = (4, 16)  # beside 8, with the first seed
    gsm8k: str | None = None  # a jsonl file of training problems that fine-tuning learns from as well
    gsm8k_test: str | None = None  # and one of test problems, of which `held_out` are asked at the end
    base_template: str = "r1_short"  # in which the base is asked; chat_plain for a chat model
    devices: tuple[str, ...] = ()  # of CUDA_VISIBLE_DEVICES, a process each in turn; (): what all of them see
    attention: str = "sdpa"
    kernels: str = "plain"
    held_out: int = 500
    solutions: int = 6_000  # worked ones, for fine-tuning
    sft_steps: int = 28
    full_steps: int = 60  # of a second fine-tuning on the same solutions, on which RL is tried as well
    full_seeds: tuple[int, ...] = (1, 2)
    batches: int = 1_000
    prompts: int = 32
    max_new_tokens: int = 128
    seq_len: int = 512  # of fine-tuning's packed rows
    sft_tokens: int = 32_768  # of a step
    sft_lr: float = 1e-3
    rl_lr: float = 5e-5
    kl_coef: float = 1e-3  # enough to have the KL to the fine-tuned policy in the record
    micro_batch_tokens: int = 32_768
    evaluate_every: int = 60
    sft_s: float = 40.0
    rl_s: float = 100.0
    evaluate_s: float = 60.0
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> str:
        return str(self.work / "runs")

    @property
    def held_out_file(self) -> Path:
        return self.work / "held_out.jsonl"


@dataclass
class Run:
    """One process: a name, its command, and what it is for the table."""

    name: str
    command: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


def script(module: str, *overrides: str) -> list[str]:
    """A script of ours in a process of its own, with as few threads as side by side allow."""
    return ["env", "OMP_NUM_THREADS=2", sys.executable, "-u", "-m", module, *overrides]


def write_held_out(plan: Plan) -> None:
    """Exactly `held_out` different problems: drawn twice, a problem would count twice."""
    drawn = load_problems(DatasetConfig(level=plan.level, split="held_out", size=2 * plan.held_out, seed=99))
    different = list(islice(without_repeats(drawn), plan.held_out))
    assert len(different) == plan.held_out, f"{plan.level} has {len(different)} different ones of {plan.held_out}"
    plan.held_out_file.parent.mkdir(parents=True, exist_ok=True)
    plan.held_out_file.unlink(missing_ok=True)
    RunDir(plan.work).append_jsonl(plan.held_out_file.name, [problem_record(problem) for problem in different])


def held_out_data(plan: Plan) -> str:
    """All of the file: without a size the scripts' own configs would take its first 200."""
    return f"{{source: jsonl, path: {plan.held_out_file}, split: all, size: {plan.held_out}}}"


def training_data(plan: Plan, size: int, seed: int) -> str:
    return f"{{source: arithmetic, level: {plan.level}, split: train, size: {size}, seed: {seed}}}"


def sft_run(plan: Plan, seed: int, kind: str = "sft") -> Run:
    """Worked solutions in the short prompt; the base's own accuracy is measured before the first step."""
    steps = plan.full_steps if kind == "full" else plan.sft_steps
    data = [training_data(plan, plan.solutions, seed)]
    if plan.gsm8k is not None:
        data.append(f"{{source: jsonl, path: {plan.gsm8k}, split: all}}")
    overrides = [
        f"name={kind}_{seed}", f"runs_dir={plan.runs}", f"init_from={plan.base}", f"seed={seed}",
        f"max_steps={steps}", f"max_time_s={plan.sft_s}", f"validate_every={steps}",
        f"micro_batch_size={min(16, plan.sft_tokens // plan.seq_len)}", f"global_batch_tokens={plan.sft_tokens}",
        f"data.seq_len={plan.seq_len}", f"optimizer.lr={plan.sft_lr}", f"attention={plan.attention}",
        f"kernels={plan.kernels}", "schedule.warmup_steps=5", "prompt.template=r1_short",
        f"generation.problems={plan.held_out}", f"generation.max_new_tokens={plan.max_new_tokens}",
        "rollout.memory_fraction=0.05", f"checkpoint.every_steps={steps}",
        f"train_data=[{', '.join(data)}]", f"held_out_data={held_out_data(plan)}",
    ]  # fmt: skip
    return Run(f"{kind}_{seed}", script("alignment.sft", *overrides), {"seed": seed})


def sft_runs(plan: Plan) -> list[Run]:
    """Every seed's start, and the longer fine-tunings."""
    longer = [sft_run(plan, seed, "full") for seed in plan.full_seeds]
    return [sft_run(plan, seed) for seed in plan.seeds] + longer


def rl_run(plan: Plan, name: str, facts: dict[str, Any], *more: str) -> Run:
    """From a seed's fine-tuned weights; as many completions a batch whatever the group.

    facts: seed, algorithm, group_size, start (the run that it begins from).
    """
    seed, group_size = facts["seed"], facts["group_size"]
    overrides = [
        f"name={name}", f"runs_dir={plan.runs}", f"init_from={plan.runs}/{facts['start']}", f"seed={seed}",
        f"algorithm={facts['algorithm']}", "algorithm.importance_cap=2.0", "algorithm.kl=k3",
        f"algorithm.kl_coef={plan.kl_coef}", f"num_batches={plan.batches}", f"max_time_s={plan.rl_s}",
        f"prompts_per_batch={plan.prompts * 8 // group_size}", f"group_size={group_size}",
        f"max_new_tokens={plan.max_new_tokens}", f"optimizer.lr={plan.rl_lr}", "schedule.warmup_steps=5",
        f"micro_batch_tokens={plan.micro_batch_tokens}", "rollout.max_running=256", "rollout.memory_fraction=0.05",
        f"kernels={plan.kernels}", f"evaluate_every={plan.evaluate_every}", "evaluate_samples=2",
        "checkpoint.every_steps=100000", "prompt.template=r1_short", "log_completions=4",
        f"train_data=[{training_data(plan, 6_000, 50 + seed)}]", f"held_out_data={held_out_data(plan)}", *more,
    ]  # fmt: skip
    return Run(name, script("alignment.train_rl", *overrides), facts)


def rl_runs(plan: Plan) -> list[Run]:
    """Every algorithm with every seed, other group sizes with the first, and what follows on a longer fine-tuning."""
    found, first = [], plan.algorithms[0]

    def add(name: str, algorithm: str, group_size: int, seed: int, start: str) -> None:
        facts = {"algorithm": algorithm, "group_size": group_size, "seed": seed, "start": start}
        found.append(rl_run(plan, name, facts))

    for algorithm in plan.algorithms:
        for seed in plan.seeds:
            add(f"{algorithm}_g8_s{seed}", algorithm, 8, seed, f"sft_{seed}")
    for size in plan.groups:
        add(f"{first}_g{size}_s{plan.seeds[0]}", first, size, plan.seeds[0], f"sft_{plan.seeds[0]}")
    for seed in plan.full_seeds:
        add(f"{first}_full_s{seed}", first, 8, seed, f"full_{seed}")
    return found


def precision_runs(plan: Plan) -> list[Run]:
    """Three batches each, for the difference of sampler and trainer: in float32, and with batch-invariant rollouts."""
    short = ("num_batches=3", "evaluate_samples=0", "evaluate_every=100000")
    facts = {"algorithm": "grpo", "group_size": 8, "seed": plan.seeds[0], "start": f"sft_{plan.seeds[0]}"}
    kinds = {
        "precision_float32": ("dtype=float32", "rollout.dtype=float32", "kernels=plain"),
        "precision_invariant": ("rollout.batch_invariant=true",),
    }
    return [rl_run(plan, name, facts, *short, *more) for name, more in kinds.items()]


def evaluation_run(plan: Plan, name: str, run: str, template: str = "r1_short", data: str | None = None) -> Run:
    """Eight answers at temperature 1 to each held-out problem, or to those of `data`: pass@1 and pass@8."""
    longer = template != "r1_short" or data is not None
    tokens = max(plan.max_new_tokens, LONG_NEW_TOKENS) if longer else plan.max_new_tokens
    overrides = [
        f"name=eval_{name}", f"runs_dir={plan.runs}", f"run={run}", f"data={data or held_out_data(plan)}",
        f"num_samples={EVALUATED_SAMPLES}", f"ks=[1, {EVALUATED_SAMPLES}]", "temperature=1",
        f"max_new_tokens={tokens}", f"prompt.template={template}", "rollout.max_running=512",
        "rollout.memory_fraction=0.05", f"requests_at_once={EVALUATED_SAMPLES * plan.held_out}", "grader_workers=0",
    ]  # fmt: skip
    return Run(f"eval_{name}", script("alignment.evaluate", *overrides))


def evaluation_runs(plan: Plan, policies: list[str], on_gsm8k: list[str]) -> list[Run]:
    """The base and `policies` on the held-out problems; the base and `on_gsm8k` on GSM8K's where there are some."""
    runs = [evaluation_run(plan, "base", plan.base, plan.base_template)]
    runs += [evaluation_run(plan, name, f"{plan.runs}/{name}") for name in policies]
    if plan.gsm8k_test is not None:
        data = f"{{source: jsonl, path: {plan.gsm8k_test}, split: all, size: {plan.held_out}}}"
        runs.append(evaluation_run(plan, "gsm8k_base", plan.base, plan.base_template, data))
        runs += [evaluation_run(plan, f"gsm8k_{name}", f"{plan.runs}/{name}", data=data) for name in on_gsm8k]
    return runs


def side_by_side(plan: Plan, runs: list[Run], limit_s: float) -> float:
    """Run all at once with a log each; those that outlive the limit are ended and noted. Returns the seconds taken."""
    started_s, logs, devices = time.perf_counter(), plan.out / "logs", plan.devices
    logs.mkdir(parents=True, exist_ok=True)
    processes = []
    for index, run in enumerate(runs):
        place = [f"CUDA_VISIBLE_DEVICES={devices[index % len(devices)]}"] if devices else []
        with open(logs / f"{run.name}.txt", "w", encoding="utf-8") as log:
            processes.append(subprocess.Popen(["env", *place, *run.command], stdout=log, stderr=subprocess.STDOUT))
    for run, process in zip(runs, processes, strict=True):
        try:
            code = process.wait(max(1.0, limit_s - (time.perf_counter() - started_s)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            tail = (logs / f"{run.name}.txt").read_text(encoding="utf-8", errors="replace")[-800:]
            plan.notes.append(f"{run.name} ended with {code}: {tail}")
    return time.perf_counter() - started_s
