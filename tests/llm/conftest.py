"""A small corpus, tokenizer and token directory made by the project's own scripts, once a test session."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from data_processing.document import write_documents
from llm import bpe_training, tokenize_corpus
from tests.stories import make_stories

SERVED = ("fastapi", "starlette", "uvicorn", "openai")  # what the modules below import
NEED_SERVER = {
    "test_chat.py",
    "test_serve.py",
    *(f"test_serve_{x}.py" for x in ("clients", "page", "script", "worker")),
}


class ModuleWithoutServer(pytest.Module):
    """A module whose imports would fail: skipped, with the reason."""

    def collect(self):
        pytest.skip("needs the serve and dev extras: pip install -e '.[serve,dev]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.name in NEED_SERVER and not all(find_spec(name) for name in SERVED):
        return ModuleWithoutServer.from_parent(parent, path=module_path)
    return None


@dataclass
class TinyCorpus:
    tokens: Path
    tokenizer: Path

    def overrides(self, runs_dir: Path) -> list[str]:
        """Command-line overrides of llm.training for a model that steps in milliseconds."""
        return [
            "name=tiny", f"runs_dir={runs_dir}", f"data.tokens={self.tokens}", f"data.tokenizer={self.tokenizer}",
            "model.d_model=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.d_ff=48",
            "model.max_seq_len=32", "data.seq_len=32", "micro_batch_size=4", "global_batch_tokens=256", "max_steps=6",
            "log_every=1", "validate_every=100", "validation_tokens=2048", "schedule.warmup_steps=2",
            "optimizer.lr=0.01", "sample_tokens=4", "device=cpu",
        ]  # fmt: skip


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory) -> TinyCorpus:
    root = tmp_path_factory.mktemp("tiny")
    write_documents(root / "corpus" / "documents_00000.jsonl", make_stories(200, seed=0))
    corpus = str(root / "corpus")
    bpe_training.body(bpe_training.BpeTrainingConfig(corpus, str(root / "tokenizer"), vocab_size=320))
    settings = tokenize_corpus.TokenizeCorpusConfig(corpus, str(root / "tokenizer"), str(root / "tokens"))
    settings.val_fraction = 0.1
    tokenize_corpus.body(settings)
    return TinyCorpus(root / "tokens", root / "tokenizer")
