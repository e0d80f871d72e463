"""A small base model of our own for the reinforcement-learning benchmark: pretrained for a minute on word problems.

Its documents are questions with their worked solutions in plain sentences, without the prompt or the answer tags that
fine-tuning teaches; training problems only.
"""

from pathlib import Path

from alignment.dataset import DatasetConfig, load_problems
from data_processing.document import Document, write_documents

NUM_PROBLEMS = 60_000


def write_corpus(directory: Path, level: str) -> None:
    """One document a problem."""
    problems = load_problems(DatasetConfig(level=level, split="train", size=NUM_PROBLEMS, seed=7))
    documents = [
        Document(
            id=problem.id, source=level, text=f"{problem.question}\n{problem.solution} The answer is {problem.answer}."
        )
        for problem in problems
    ]
    write_documents(directory / "documents_00000.jsonl", documents)


def pretrain_commands(work: Path, level: str, seconds: float) -> list[tuple[str, list[str]]]:
    """Write the corpus; return (name, module and overrides) of what makes runs/base of it, in order."""
    corpus, tokenizer, tokens = (str(work / name) for name in ("corpus", "tokenizer", "tokens"))
    write_corpus(Path(corpus), level)
    training = [
        "name=base", f"runs_dir={work / 'runs'}", f"data.tokens={tokens}", f"data.tokenizer={tokenizer}",
        "model=mew-12m", "data.seq_len=512", "data.document_masking=true", "micro_batch_size=64",
        "global_batch_tokens=65536", "max_steps=600", f"max_time_s={seconds}", "optimizer.lr=2e-3",
        "schedule.warmup_steps=50", "validate_every=600", "checkpoint.every_steps=600", "sample_tokens=0",
    ]  # fmt: skip
    return [
        ("tokenizer", ["llm.bpe_training", f"corpus={corpus}", "vocab_size=2048", f"output={tokenizer}"]),
        ("tokens", ["llm.tokenize_corpus", f"corpus={corpus}", f"tokenizer={tokenizer}", f"output={tokens}"]),
        ("base", ["llm.training", *training]),
    ]
