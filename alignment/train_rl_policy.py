"""The policy as the training step sees it: from a PolicyBatch to its loss sums, and the log-probs before an update.

Log-probs are at the temperature that the sampler had, and ids that the tokenizer lacks are impossible, as they are for
the sampler. The output layer meets the states of sampled tokens alone: prompts and padding cost no logits.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from alignment.grpo import AlgorithmConfig, PolicyLoss, policy_loss
from alignment.grpo_log_probs import token_entropies, token_log_probs
from alignment.grpo_objectives import PolicyTokens
from alignment.train_rl_batch import PolicyBatch, empty_policy_batch
from llm.data_loader import Batch
from llm.loss import LossSums
from llm.transformer_context import make_context
from llm.transformer_layers import Linear


class Policy:
    """Loss and log-probs of a model's sampled tokens.

    num_ids: the tokenizer's vocabulary; the model's may be padded beyond it. max_new_tokens: the constant of
    aggregation "constant". After a step `take_metrics` gives the sums of its micro-batches on this rank.
    """

    def __init__(self, model: nn.Module, algorithm: AlgorithmConfig, temperature: float, num_ids: int, max_new: int):
        self.model, self.algorithm = model, algorithm
        self.temperature, self.num_ids, self.max_new_tokens = temperature, num_ids, max_new
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def forward(self, model: nn.Module, batch: PolicyBatch, entropies: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs (B, T) of the sampled targets, 0 elsewhere, and if asked for the entropies in their places."""

        def head(states: Tensor, output: Linear) -> tuple[Tensor, Tensor | None]:
            sampled = states.flatten(0, 1)[batch.rows][None]  # (1, N, C)
            logits = output(sampled)  # (1, N, V)
            targets = batch.targets.flatten()[batch.rows][None]  # (1, N)
            log_probs = token_log_probs(logits, targets, self.temperature, self.num_ids)
            return log_probs, token_entropies(logits.detach(), self.temperature, self.num_ids) if entropies else None

        log_probs, spread = model(batch.token_ids, make_context(batch.token_ids), head=head)
        return self.place(log_probs, batch), None if spread is None else self.place(spread, batch)

    def place(self, values: Tensor, batch: PolicyBatch) -> Tensor:
        """Values (1, N) of the sampled tokens at their places in zeros (B, T)."""
        flat = values.new_zeros(batch.targets.numel()).index_copy(0, batch.rows, values[0])
        return flat.view(batch.targets.shape)

    def forward_loss(self, batch: Batch) -> LossSums:
        """What TrainingStep calls of each micro-batch on the device."""
        if not isinstance(batch, PolicyBatch):
            batch = empty_policy_batch(batch)
        log_probs, entropies = self.forward(self.model, batch, entropies=True)
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        tokens = PolicyTokens(
            batch.responses, log_probs, old, batch.advantages, batch.sampler_log_probs, batch.reference_log_probs
        )
        loss = policy_loss(tokens, self.algorithm, self.max_new_tokens, entropies)
        self.note(loss)
        return LossSums(loss.loss_sum, torch.zeros_like(loss.loss_sum), torch.tensor(loss.units))

    def note(self, loss: PolicyLoss) -> None:
        for name, value in loss.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in loss.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def take_metrics(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The sums and maxima since the last call, on this rank."""
        taken, self.sums, self.maxima = (self.sums, self.maxima), {}, {}
        return taken

    @torch.no_grad()
    def log_probs(self, model: nn.Module, batch: PolicyBatch, autocast: Callable[[], AbstractContextManager]) -> Tensor:
        """Log-probs (B, T) under the policy's own or a frozen model.

        In the shapes and the precision of an update, so that the ratios of the first one are exactly 1.
        """
        with autocast():
            return self.forward(model, batch, entropies=False)[0]
