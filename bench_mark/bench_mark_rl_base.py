"""A small base model of our own for the reinforcement-learning benchmark: pretrained for a minute on word problems.

Its documents are questions with their worked solutions in plain sentences, without the prompt or the answer tags that
fine-tuning teaches; training problems only.
"""

from dataclasses import dataclass
from pathlib import Path

from alignment.dataset import DatasetConfig, load_problems
from alignment.problem import Problem
from alignment.r1_prompt import TEMPLATES
from data_processing.document import Document, write_documents


@dataclass
class Pretraining:
    """Of the base model: its shape (configs/model), documents, tokens a step, steps, and the time it has at most."""

    model: str = "mew-12m"
    problems: int = 60_000
    tokens: int = 65_536
    steps: int = 600
    seconds: float = 40.0


def write_corpus(work: Path, level: str, count: int) -> None:
    """One document a problem; for the tokenizer a fifth of them as fine-tuning will show them as well.

    A tokenizer that never saw the tags cuts them into bytes: after 40 steps of fine-tuning one completion in nine had
    them right, although its sums were.
    """
    problems = load_problems(DatasetConfig(level=level, split="train", size=count, seed=7))
    plain = [Document(id=problem.id, source=level, text=text_of(problem)) for problem in problems]
    shown = [Document(id=f"{one.id}/r1", source=level, text=formatted(one)) for one in problems[: count // 5]]
    write_documents(work / "corpus" / "documents_00000.jsonl", plain)
    write_documents(work / "tokenizer_corpus" / "documents_00000.jsonl", plain + shown)


def formatted(problem: Problem) -> str:
    prompt = TEMPLATES["r1_short"].text.format(question=problem.question)
    return f"{prompt} {problem.solution} </think> <answer> {problem.answer} </answer>"


def text_of(problem: Problem) -> str:
    return f"{problem.question}\n{problem.solution} The answer is {problem.answer}."


def pretrain_commands(work: Path, level: str, pretraining: Pretraining) -> list[tuple[str, list[str]]]:
    """Write the corpus; return (name, module and overrides) of what makes runs/base of it, in order."""
    corpus, tokenizer, tokens = (str(work / name) for name in ("corpus", "tokenizer", "tokens"))
    write_corpus(work, level, pretraining.problems)
    training = [
        "name=base", f"runs_dir={work / 'runs'}", f"data.tokens={tokens}", f"data.tokenizer={tokenizer}",
        f"model={pretraining.model}", "data.seq_len=256", "data.document_masking=true",
        f"micro_batch_size={min(128, pretraining.tokens // 256)}", f"global_batch_tokens={pretraining.tokens}",
        f"max_steps={pretraining.steps}", f"max_time_s={pretraining.seconds}", "optimizer.lr=2e-3",
        "schedule.warmup_steps=50", f"validate_every={pretraining.steps}",
        f"checkpoint.every_steps={pretraining.steps}", "sample_tokens=0",
    ]  # fmt: skip
    return [
        (
            "tokenizer",
            ["llm.bpe_training", f"corpus={work / 'tokenizer_corpus'}", "vocab_size=2048", f"output={tokenizer}"],
        ),
        ("tokens", ["llm.tokenize_corpus", f"corpus={corpus}", f"tokenizer={tokenizer}", f"output={tokens}"]),
        ("base", ["llm.training", *training]),
    ]
