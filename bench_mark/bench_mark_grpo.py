"""A GRPO step of ours beside one of TRL's GRPOTrainer with its default generation, in one run.

    python -m bench_mark.bench_mark_grpo --out grpo.json        # a GPU: SmolLM2-135M's shape, 32 x 8 x 128 tokens, bf16
    python -m bench_mark.bench_mark_grpo                        # a CPU: mew-1m's shape, 4 x 4 x 32, float32

Steps alternate: one of theirs, one of ours. On a CPU one thread works and seconds are the process's own. Both start
from the same random weights, write exactly --new tokens a completion and get the same rewards. Predicted is
alignment/cost_model's step, for both. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from alignment.cost_model import RlPrediction, device_of, predict_batch
from alignment.cost_model_calibration import Setting, calibrate_engine
from alignment.cost_model_rollout import Device, Lengths
from alignment.train_rl_setup import RlRun
from bench_mark.bench_mark_grpo_contestants import Case, Ours, StepTime, Trl
from bench_mark.bench_mark_serve_model import make_model
from configs.errors import UserError
from configs.version import git_commit
from llm.hardware_calibration import calibrate
from parallel.mesh import close_mesh, init_mesh

TARGET = 1.5  # our tokens a second over theirs
WARM_UP = 1  # steps of each that are not counted: graphs are captured, memory is touched


def parse_arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m" if on_gpu else "mew-1m", help="of configs/model")
    parser.add_argument("--prompts", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--group", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--new", type=int, default=128 if on_gpu else 32, help="tokens of a completion")
    parser.add_argument("--micro-rows", type=int, default=64 if on_gpu else 16, help="completions at once in updates")
    parser.add_argument("--steps", type=int, default=4, help="counted, of each")
    parser.add_argument("--kernels", default="plain", help="of our trainer: plain or fused")
    parser.add_argument(
        "--peer-weights", default="float32", choices=("float32", "bfloat16"),
        help="of TRL's model; float32 with bfloat16 products is what ours has",
    )  # fmt: skip
    parser.add_argument("--no-peer", action="store_true", help="ours alone")
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the last line")
    return parser.parse_args()


def measure(case: Case, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Both contestants' counted steps and the prediction."""
    checkpoint, exported, shape = make_model(case.model, work, torch.float32)
    world = init_mesh("auto")
    try:
        ours = Ours(case, checkpoint, work, world)
        mean_prompt = statistics.mean(map(len, ours.prompts))
        run = ours.run
        device = measured_device(run)
        lengths = Lengths([len(prompt) for prompt in ours.prompts], [case.new], case.group)
        predicted = predict_batch(run.config, shape, device, lengths)
        own: list[StepTime] = []
        theirs: list[StepTime] = []
        steps = WARM_UP + arguments.steps
        version = None
        if arguments.no_peer:
            own = [ours.step() for _ in range(steps)]
        else:
            peer = Trl(case, exported, work, ours.prompts, arguments.peer_weights)
            theirs, version = peer.run(steps, lambda: own.append(ours.step())), peer.version
    finally:
        close_mesh(world)
    return {
        "predicted": predicted.fields(), "prompt_tokens": mean_prompt, "device": run.hardware.description,
        "dtype": run.config.dtype, "trl": version, "rates": asdict(device.hardware.rates),
        "engine_rates": asdict(device.engine), "ours": own[WARM_UP:], "theirs": theirs[WARM_UP:],
    } | {"rows": rows_of(predicted, own[WARM_UP:], theirs[WARM_UP:])}  # fmt: skip


def measured_device(run: RlRun) -> Device:
    """The constants by the clock that the steps are timed with."""
    if run.hardware.device == "cuda":
        return device_of(run.hardware, run.config.rollout, run.tokenizer)
    rates = calibrate(torch.device("cpu"), torch.float32, time.process_time)
    hardware = replace(run.hardware, rates=rates, memory_bytes_per_s=rates.new_pass[-1][0] / rates.new_pass[-1][1])
    at = Setting(torch.device("cpu"), torch.float32, rates.matmul, run.tokenizer, time.process_time)
    return Device(hardware, calibrate_engine(at), 4)


def median(steps: list[StepTime], name: str) -> float:
    return statistics.median(getattr(step, name) for step in steps)


def rows_of(predicted: RlPrediction, own: list[StepTime], theirs: list[StepTime]) -> list[dict[str, Any]]:
    """The table: seconds of the step and its two halves, then tokens a second."""
    rows, rates = [], {}
    for name, steps in (("ours", own), ("TRL", theirs)):
        if not steps:
            continue
        step_s, rollout_s = median(steps, "step_s"), median(steps, "rollout_s")
        tokens = median(steps, "tokens")
        rates[name] = tokens / step_s
        whole_s = predicted.step_time_s
        bound = TARGET * rates["TRL"] if name == "ours" and "TRL" in rates else None
        rows += [
            row(f"{name}: rollout (s)", predicted.rollout_s, rollout_s),
            row(f"{name}: the rest (s)", whole_s - predicted.rollout_s, step_s - rollout_s),
            row(f"{name}: step (s)", whole_s, step_s),
            row(f"{name}: rollout share", predicted.rollout_s / whole_s, rollout_s / step_s),
            row(f"{name}: completion tokens/s", tokens / whole_s, rates[name], bound),
        ]
    if len(rates) == 2:
        rows.append(row("ours over TRL, tokens/s", None, rates["ours"] / rates["TRL"], TARGET))
    return rows


def row(what: str, predicted: float | None, measured: float, bound: float | None = None) -> dict[str, Any]:
    ratio = measured / predicted if predicted else None
    return {"what": what, "predicted": predicted, "measured": measured, "ratio": ratio, "bound": bound}


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'':28} {'predicted':>11} {'measured':>11} {'ratio':>7} {'bound':>9}")
    for one in rows:
        cells = [f"{one[name]:.4g}" if one[name] is not None else "-" for name in ("predicted", "measured")]
        ratio = f"{one['ratio']:.2f}" if one["ratio"] is not None else "-"
        bound = f">= {one['bound']:.4g}" if one["bound"] is not None else "-"
        print(f"{one['what']:28} {cells[0]:>11} {cells[1]:>11} {ratio:>7} {bound:>9}")


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # processor seconds count every thread
    try:
        case = Case(
            arguments.model, arguments.prompts, arguments.group, arguments.new, arguments.micro_rows, arguments.kernels
        )
        with tempfile.TemporaryDirectory(prefix="mew_grpo_") as directory:
            found = measure(case, arguments, Path(directory))
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    document = {
        "case": vars(case), "torch": torch.__version__, "commit": git_commit(), "peer_weights": arguments.peer_weights,
        **found, "ours": [vars(step) for step in found["ours"]], "theirs": [vars(step) for step in found["theirs"]],
    }  # fmt: skip
    print(
        f"{found['device']} · {found['dtype']} · torch {torch.__version__} · TRL {found['trl']}, its weights "
        f"{arguments.peer_weights} · commit {document['commit']} · {case.model}, {case.prompts} prompts of "
        f"{found['prompt_tokens']:.0f} tokens x {case.group} completions of {case.new}"
    )
    print_rows(found["rows"])
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
