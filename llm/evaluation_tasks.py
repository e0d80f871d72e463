"""The three questions that task harnesses ask of a model, answered by ours: llm/evaluation_lm_eval.py hands them on.

- how likely is a continuation after a context, and would greedy decoding have written it,
- how likely is a whole text,
- what does the model write after a context until a stop string.

Contexts and continuations are cut into tokens as lm-evaluation-harness's own models do it: both together, and what goes
beyond the context's own tokens is the continuation; spaces at the context's end belong to the continuation. B rows, T
tokens, n scored tokens, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError
from llm.bpe_tokenizer import Tokenizer
from llm.engine import Engine, EngineConfig, RequestParams
from llm.evaluation_windows import ScoreConfig, TextScorer
from llm.transformer import Transformer
from llm.transformer_context import make_context


@dataclass(frozen=True)
class TaskConfig:
    """seq_len: the longest row; longer contexts lose their beginning. document_start: put end-of-text before each."""

    seq_len: int
    batch_size: int = 16
    document_start: bool = False


class TaskModel:
    """A model in evaluation mode with its tokenizer, asked in batches; answers come in the order of the questions."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: TaskConfig, device: torch.device):
        self.model, self.tokenizer, self.config, self.device = model, tokenizer, config, device

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context, never none, and of what follows it, at least one; UserError for no continuation."""
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if not continuation:
            raise UserError("a continuation is empty; give each choice of the task a text")
        whole, before = self.tokenizer.encode(kept + continuation), self.tokenizer.encode(kept)
        before = before[: len(whole) - 1]  # merges across the border may leave nothing after as many tokens
        start = [self.tokenizer.start_id] if self.config.document_start or not before else []
        return start + whole[: len(before)], whole[len(before) :]

    def log_likelihoods(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log p of the continuation in nats, whether it is what greedy decoding writes) for (context, continuation).

        Raises UserError for a continuation that does not fit the model's window.
        """
        encoded = [self.encode_pair(*pair) for pair in pairs]
        longest = max((len(continuation) for _, continuation in encoded), default=0)
        if longest > self.config.seq_len:
            raise UserError(
                f"a continuation has {longest} tokens, the window holds {self.config.seq_len}; use a shorter"
            )
        order = sorted(range(len(encoded)), key=lambda index: -sum(map(len, encoded[index])))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(encoded)
        for first in range(0, len(order), self.config.batch_size):
            batch = order[first : first + self.config.batch_size]
            for index, answer in zip(batch, self.score_batch([encoded[i] for i in batch]), strict=True):
                answers[index] = answer
        return answers

    @torch.no_grad()
    def score_batch(self, batch: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows = [(context + continuation)[-self.config.seq_len - 1 :] for context, continuation in batch]
        counts = [len(continuation) for _, continuation in batch]
        token_ids = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)  # (B, T)
        for place, row in enumerate(rows):
            token_ids[place, : len(row) - 1] = torch.tensor(row[:-1])
        # Only the states before scored tokens meet the output matrix: n x V logits, not B x T x V.
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))  # (n,)
        columns = torch.cat([torch.arange(len(row) - 1 - n, len(row) - 1) for row, n in zip(rows, counts, strict=True)])
        targets = torch.cat([torch.tensor(row[-n:]) for row, n in zip(rows, counts, strict=True)])  # (n,)
        log_probs = self.next_log_probs(token_ids.to(self.device), row_of, columns)  # (n, V)
        chosen = log_probs.gather(1, targets.to(self.device)[:, None])[:, 0]  # (n,)
        known = log_probs[:, : self.tokenizer.vocab_size]  # a padded vocabulary's other ids are never written
        greedy = known.argmax(-1) == targets.to(self.device)  # (n,)
        sums = [part.sum().item() for part in chosen.cpu().double().split(counts)]
        return list(zip(sums, [bool(part.all()) for part in greedy.cpu().split(counts)], strict=True))

    def next_log_probs(self, token_ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """log p of every next token after token_ids (B, T) at n places: (n, V), at least float32."""
        hidden = self.model.hidden_states(token_ids, make_context(token_ids))  # (B, T, C)
        logits = self.model.output(hidden[rows.to(self.device), columns.to(self.device)])  # (n, V)
        return logits.float().log_softmax(-1)

    def text_log_likelihoods(self, texts: list[str]) -> list[float]:
        """log p of each whole text after an end-of-text token, in windows that fill the context, each token once."""
        scoring = ScoreConfig(self.config.seq_len, self.config.seq_len, self.config.batch_size)
        scorer = TextScorer(self.model, self.tokenizer, scoring, self.device)
        rows = [np.array([self.tokenizer.start_id, *self.tokenizer.encode(text)]) for text in texts]
        return [-float(nats.sum()) for nats in scorer.token_nats(rows)]

    def write(self, contexts: list[str], params: list[RequestParams]) -> list[str]:
        """What the model writes after each context by its params, without what ended it; end-of-text always ends it.

        Contexts lose their beginning where max_new_tokens would not fit; UserError when none of it would be left.
        """
        eot_id = self.tokenizer.eot_id
        start = [self.tokenizer.start_id] if self.config.document_start else []
        prompts = []
        for context, own in zip(contexts, params, strict=True):
            room = self.config.seq_len - own.max_new_tokens
            if room < 1:
                raise UserError(
                    f"{own.max_new_tokens} new tokens leave no room for a context in {self.config.seq_len}; "
                    f"lower the task's max_gen_toks"
                )
            prompts.append((start + self.tokenizer.encode(context))[-room:] or [eot_id])
        completions = self.engine.generate(prompts, [replace(own, stop_ids=(eot_id,)) for own in params])
        return [completion.text for completion in completions]

    @cached_property
    def engine(self) -> Engine:
        """Made when something is to be written: it takes memory for its cache."""
        config = EngineConfig(max_running=self.config.batch_size, num_ids=self.tokenizer.vocab_size,
                              max_seq_len=self.config.seq_len, fuse=False)  # fmt: skip
        return Engine(self.model, config, self.tokenizer)
