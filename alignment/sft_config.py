"""Everything that `python -m alignment.sft` takes: llm.training's config, and what supervised fine-tuning adds."""

from dataclasses import dataclass, field

from alignment.dataset import DatasetConfig
from alignment.r1_prompt import PromptConfig
from alignment.rollout import RolloutConfig
from configs.errors import UserError, check_choice, check_positive
from llm.args import ATTENTION_BACKENDS, ModelConfig, TrainConfig


@dataclass
class GenerationConfig:
    """How held-out problems are answered during training; problems=0: not at all."""

    problems: int = 200  # the first so many of held_out_data
    max_new_tokens: int = 256
    temperature: float = 0.0
    samples: int = 4  # of the answers, in samples.txt and the report

    def __post_init__(self) -> None:
        check_positive(**{"generation.max_new_tokens": self.max_new_tokens})
        if min(self.problems, self.samples, self.temperature) < 0:
            raise UserError(
                f"generation.problems={self.problems}, samples={self.samples} and temperature={self.temperature} must "
                f"not be negative; use 0 for none"
            )


@dataclass
class SftConfig(TrainConfig):
    """One run of supervised fine-tuning: a TrainConfig whose tokens are worked solutions of problems.

    data.tokens stays empty and data.tokenizer may: the checkpoint of init_from has its own. model null: its shape too.
    """

    model: ModelConfig | None = None
    attention: str | None = None  # backend in place of the checkpoint's; on a GPU "triton" knows packed rows' lengths
    epochs: float | None = None  # passes over the training examples, in place of max_steps
    packing: str = "best_fit"  # or "none": one example a row, padded to data.seq_len
    pack_window: int = 4096  # examples that are packed together
    train_data: list[DatasetConfig] = field(default_factory=list)
    held_out_data: DatasetConfig = "???"
    prompt: PromptConfig = field(default_factory=PromptConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        if self.model is not None:  # else once the checkpoint has filled it in
            super().__post_init__()
        if not self.train_data:
            raise UserError("train_data=[]: there is nothing to train on; name at least one data set (train_data)")
        if self.init_from is None and self.model is None:
            raise UserError("init_from=null and model=null: give a checkpoint to start from, init_from=runs/x")
        if self.epochs is not None:
            check_positive(epochs=self.epochs)
        if self.attention is not None:
            check_choice("attention", self.attention, ATTENTION_BACKENDS)
        if not self.data.document_masking:
            raise UserError("data.document_masking=false would let packed examples see each other; use true")
