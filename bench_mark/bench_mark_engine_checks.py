"""Is the engine right on this device: log-probabilities against a full forward pass, and what company changes."""

from typing import Any

import torch

from llm.engine import Completion, Engine, EngineConfig, RequestParams
from llm.sampling import SamplingConfig
from llm.transformer import Transformer

SAMPLED = SamplingConfig(temperature=1.0, seed=7)


@torch.inference_mode()
def log_prob_errors(model: Transformer, completions: list[Completion]) -> torch.Tensor:
    """|engine - full forward| of every token; the forward pass is the model's own, in its dtype."""
    errors = []
    for one in completions:
        row = torch.tensor([one.prompt_ids + one.token_ids], device=model.output.weight.device)
        logits = model(row)[0, len(one.prompt_ids) - 1 : -1].float()
        exact = logits.log_softmax(-1).gather(1, row[0, len(one.prompt_ids) :, None])[:, 0].cpu()
        errors.append((exact - torch.tensor(one.log_probs)).abs())
    return torch.cat(errors)


def check_engine(model: Transformer) -> dict[str, Any]:
    """Log-probability errors, and the share of tokens that a request alone and in a batch have in common."""
    generator = torch.Generator().manual_seed(3)
    vocab = model.config.vocab_size
    prompts = [torch.randint(1, vocab, (5 + 23 * i,), generator=generator).tolist() for i in range(8)]
    found: dict[str, Any] = {}
    for invariant in (False, True):
        settings = dict(max_running=8, max_seq_len=256, prefix_sharing=False, batch_invariant=invariant)
        params = [RequestParams(SAMPLED, max_new_tokens=16, index=i) for i in range(8)]
        engine = Engine(model, EngineConfig(**settings))
        together = engine.generate(prompts, params)
        alone = [engine.generate([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
        errors = log_prob_errors(model, together)
        pairs = [
            (a.log_probs[i], b.log_probs[i])
            for a, b in zip(together, alone, strict=True)
            for i in range(first_difference(a, b))
        ]
        name = "invariant_" if invariant else ""
        found |= {
            f"{name}log_prob_error_mean": errors.mean().item(),
            f"{name}log_prob_error_max": errors.max().item(),
            f"{name}requests_equal_alone": sum(
                a.token_ids == b.token_ids for a, b in zip(together, alone, strict=True)
            ),
            f"{name}log_probs_max_difference_alone": max(abs(a - b) for a, b in pairs),
        }
    return found


def first_difference(a: Completion, b: Completion) -> int:
    """How many tokens two completions have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), len(a.token_ids))
