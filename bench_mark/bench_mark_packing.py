"""What packing buys: steps over packed rows beside steps over padded batches of the same examples, on GSM8K.

Two parts. Counting: the tokens that padding computes over those there are (the bound), and how much of it best-fit rows
reach, for prompts alone and for whole training sequences, beside TRL's packing where TRL is installed. Timing: one
optimizer step over the same examples, padded to the longest of each batch or packed; the speed-up predicted by the cost
model, measured, and bounded by the counted tokens. On a CPU seconds are the process' own, so other work on the machine
does not count. The last line is JSON.

    python -m bench_mark.bench_mark_packing --data ../shared/data/gsm8k/train.jsonl
    python -m bench_mark.bench_mark_packing --data train.jsonl --model gpt-124m --examples 2048 --out packing.json
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from alignment.dataset import DatasetConfig, load_problems
from alignment.packing import best_fit, density, pack, places_of
from alignment.r1_prompt import Example, PromptConfig, encode_examples, encode_prompt, prompt_format
from bench_mark.bench_mark_packing_peer import trl_rows
from configs.errors import UserError
from configs.loader import CONFIG_DIR, load_config
from configs.run_dir import write_json_atomic
from configs.version import git_commit
from data_processing.document import Document, write_documents
from llm import bpe_training
from llm.args import DataConfig, KernelsConfig, ModelConfig, TrainConfig
from llm.bpe_tokenizer import Tokenizer
from llm.cost_model import Workload, predict_step_time
from llm.data_loader import Batch
from llm.hardware import Hardware, detect_hardware
from llm.parallelize import make_forward_loss, parallelize
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from llm.transformer_init import initialise
from llm.transformer_kernels import make_loss
from parallel.mesh import Mesh, close_mesh, init_mesh

BATCHES = (4, 16, 64)
WARMUP = 1


@dataclass
class Setup:
    """One timing: the model, its tokens, and the machine."""

    config: TrainConfig
    mesh: Mesh
    hardware: Hardware
    examples: list[Example]
    seq_len: int
    repeats: int

    @property
    def lengths(self) -> list[int]:
        return [places_of(example) for example in self.examples]


def read_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE trained on the data itself: no download, about four bytes a token."""
    with tempfile.TemporaryDirectory() as folder:
        documents = [Document(id=str(i), source="gsm8k", text=text) for i, text in enumerate(texts)]
        write_documents(Path(folder) / "corpus" / "documents_00000.jsonl", documents)
        settings = bpe_training.BpeTrainingConfig(f"{folder}/corpus", f"{folder}/tokenizer", vocab_size=vocab_size)
        bpe_training.body(settings)
        return Tokenizer.load(f"{folder}/tokenizer")


def batches_of(lengths: list[int], size: int) -> list[list[int]]:
    """Random batches of `size`, as an unsorted loader draws them; the last one may be smaller."""
    order = random.Random(0).sample(range(len(lengths)), len(lengths))
    return [order[first : first + size] for first in range(0, len(order), size)]


def padded_tokens(lengths: list[int], batches: list[list[int]]) -> int:
    return sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)


def count(name: str, lengths: list[int], seq_len: int) -> dict[str, Any]:
    """Padding's tokens over the real ones at each batch size, and the share that packing reaches of that."""
    started_s = time.process_time()
    bins = best_fit(lengths, seq_len)
    row = {"lengths": name, "examples": len(lengths), "tokens": sum(lengths), "seq_len": seq_len, "rows": len(bins)}
    row |= {"filled": density(lengths, bins, seq_len), "pack_cpu_s": time.process_time() - started_s}
    row["least_rows"] = -(-sum(lengths) // seq_len)
    row["bound"] = {size: padded_tokens(lengths, batches_of(lengths, size)) / sum(lengths) for size in BATCHES}
    row["gain"] = {size: bound * row["filled"] for size, bound in row["bound"].items()}
    peer = trl_rows(lengths, seq_len)
    return row | {"trl": peer}


def print_count(row: dict[str, Any]) -> None:
    for size in BATCHES:
        print(
            f"{row['lengths']:10} batch {size:3}: padded / real {row['bound'][size]:5.2f}, packing gains "
            f"{row['gain'][size]:5.2f} of it = {row['filled']:.3f} (rows {row['rows']}, at least {row['least_rows']})"
        )
    print(f"{'':10} TRL: {row['trl']}")


def padded_batch(setup: Setup, indices: list[int]) -> Batch:
    """Right-padded rows without documents: what a step without packing sees."""
    longest = max(setup.lengths[index] for index in indices)
    batch = pack(setup.examples, [[index] for index in indices], longest)
    return Batch(batch.token_ids, batch.targets, batch.num_targets)


def make_step(setup: Setup, masked: bool) -> TrainingStep:
    """A training step over a model of its own, the same weights each time."""
    config = replace(setup.config, data=replace(setup.config.data, document_masking=masked))
    model = Transformer(config.model)
    initialise(model, seed=0)
    parts = parallelize(model.to(setup.mesh.device), config, setup.mesh)
    loss = make_loss(config.kernels, 0.0)
    return TrainingStep(config, setup.mesh, parts, make_forward_loss(parts.head_model, loss, parts.compile))


def now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def predicted_s(setup: Setup, batches: list[Batch]) -> float:
    """The cost model's seconds of one optimizer step over micro-batches of these shapes."""
    config, total = setup.config, 0.0
    for batch in batches:
        rows, tokens = batch.token_ids.shape
        work = Workload(
            config.model, rows, tokens, config.optimizer.name, 1, setup.mesh.device.type, config.dtype,
            document_masking=batch.doc_ids is not None, kernels=config.kernels,
        )  # fmt: skip
        step = predict_step_time(work, setup.hardware.rates)
        total += step.step_s - step.optimizer_s
    return total + step.optimizer_s


def time_steps(setup: Setup, contestants: dict[str, list[Batch]]) -> dict[str, dict[str, Any]]:
    """Seconds of a step over each contestant's micro-batches, in turns; losses of the first step beside them."""
    steps = {name: make_step(setup, masked=batches[0].doc_ids is not None) for name, batches in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, float] = {}
    for number in range(WARMUP + setup.repeats):
        for name, batches in contestants.items():
            started_s = now_s(setup.mesh.device)
            result = steps[name].run(number, batches)
            losses.setdefault(name, result.mean_losses(setup.mesh)[0])
            seconds[name].append(now_s(setup.mesh.device) - started_s)
    return {
        name: {"loss": losses[name], "s": statistics.median(seconds[name][WARMUP:]), "all_s": seconds[name]}
        for name in contestants
    }


def measure(setup: Setup, size: int) -> dict[str, Any]:
    """Packed against padded at one batch size; micro-batches of about as many computed tokens."""
    lengths, seq_len = setup.lengths, setup.seq_len
    groups = batches_of(lengths, size)
    padded = padded_tokens(lengths, groups)
    bins = best_fit(lengths, seq_len)
    rows = max(1, round(padded / len(groups) / seq_len))
    packed = [pack(setup.examples, bins[first : first + rows], seq_len) for first in range(0, len(bins), rows)]
    contestants = {"padded": [padded_batch(setup, group) for group in groups], "packed": packed}
    predicted = {name: predicted_s(setup, batches) for name, batches in contestants.items()}
    measured = time_steps(setup, contestants)
    bound = padded / sum(lengths)
    row = {
        "batch": size,
        "predicted": predicted["padded"] / predicted["packed"],
        "measured": measured["padded"]["s"] / measured["packed"]["s"],
        "bound": bound,
        "predicted_s": predicted,
        "steps": measured,
        "tokens": sum(lengths),
        "tokens_per_s": {name: sum(lengths) / found["s"] for name, found in measured.items()},
        "losses_differ": abs(measured["padded"]["loss"] / measured["packed"]["loss"] - 1),
    }
    return row | {"ratio": row["measured"] / row["predicted"], "share_of_bound": row["measured"] / bound}


def print_measure(row: dict[str, Any]) -> None:
    real = row["tokens_per_s"]
    print(  # flushed: a run that is cut short has shown its rows
        f"speed-up at batch {row['batch']:3} {row['predicted']:9.2f} {row['measured']:9.2f} {row['ratio']:6.2f} "
        f"{row['bound']:6.2f}   {row['share_of_bound']:.2f} of the bound; real tokens/s {real['padded']:,.0f} padded, "
        f"{real['packed']:,.0f} packed; losses differ by {row['losses_differ']:.1e}",
        flush=True,
    )


def make_setup(arguments: argparse.Namespace, mesh: Mesh, tokenizer: Tokenizer, examples: list[Example]) -> Setup:
    """The model on the device, our kernels where there is a GPU."""
    shape = load_config(ModelConfig, OmegaConf.load(f"{CONFIG_DIR}/model/{arguments.model}.yaml"))
    on_gpu = mesh.device.type == "cuda"
    shape = replace(shape.with_vocab_of(tokenizer.vocab_size), max_seq_len=arguments.seq_len)
    shape = replace(shape, attention="triton" if on_gpu else "sdpa")
    dtype = "bfloat16" if on_gpu else "float32"
    config = TrainConfig(
        name="packing", model=shape, data=DataConfig("", "", seq_len=arguments.seq_len), dtype=dtype, max_steps=100,
        kernels=KernelsConfig(fused=on_gpu),
    )  # fmt: skip
    chosen = random.Random(1).sample(examples, min(arguments.examples, len(examples)))
    hardware = detect_hardware(config.hardware, mesh.device, dtype=dtype)
    return Setup(config, mesh, hardware, chosen, arguments.seq_len, arguments.repeats)


def benchmark(arguments: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    problems = load_problems(DatasetConfig(source="jsonl", path=arguments.data, split="all"))
    tokenizer = read_tokenizer([f"{problem.question}\n{problem.solution}" for problem in problems], 8192)
    fmt = prompt_format(PromptConfig("gsm8k"), tokenizer)
    examples, _ = encode_examples(problems, fmt, tokenizer, arguments.seq_len + 1)
    prompts = [len(encode_prompt(problem.question, fmt, tokenizer)) for problem in problems]
    counted = [
        count("prompts", prompts, arguments.seq_len),
        count("sequences", [places_of(e) for e in examples], arguments.seq_len),
    ]
    for row in counted:
        print_count(row)
    result: dict[str, Any] = {"counted": counted, "timed": []}
    if arguments.examples == 0:
        return result
    setup = make_setup(arguments, mesh, tokenizer, examples)
    print(f"{arguments.model}, {setup.config.dtype}, {len(setup.examples)} examples, rows of {setup.seq_len} tokens")
    print(f"{'':20} predicted  measured  ratio  bound")
    for size in arguments.batches:
        result["timed"].append(measure(setup, size))
        print_measure(result["timed"][-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a jsonl file of GSM8K's form")
    parser.add_argument("--model", default="mew-1m", help="a shape of configs/model")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--examples", type=int, default=64, help="to be timed; 0: count only")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="padded batch sizes to be timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="also write the JSON document here")
    arguments = parser.parse_args()
    mesh = init_mesh(arguments.device)
    try:
        hardware = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "CPU, processor seconds"
        print(f"{hardware} · torch {torch.__version__} · commit {git_commit()}")
        result = benchmark(arguments, mesh)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        close_mesh(mesh)
    result |= {"hardware": hardware, "torch": torch.__version__, "commit": git_commit(), "model": arguments.model}
    if arguments.out:
        write_json_atomic(Path(arguments.out), result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
