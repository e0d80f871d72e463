"""What an import reads: a model's shape, its tensors under our names, and the tokenizer's files, whatever the format.

llm/hf_directory.py (safetensors) and llm/hf_gguf.py (GGUF) each make one of these; llm/hf_checkpoint.py writes it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from configs.errors import UserError
from llm.args import ModelConfig
from llm.hf_tensors import Named, StoredTensor, stacked
from llm.transformer_init import transformer_on_meta


@dataclass
class HfSource:
    """A foreign model, opened but not yet read."""

    where: str  # for messages
    family: str  # model_type of config.json
    config: ModelConfig
    tensors: Named  # under our names, in the model's order
    files: dict[str, bytes] = field(default_factory=dict)  # tokenizer.json and what belongs to it, by file name
    training_seq_len: int | None = None  # the window that it was trained with, which only our own exports tell


def our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model by name, tied ones once."""
    return {name: tuple(parameter.shape) for name, parameter in transformer_on_meta(config).named_parameters()}


def match_tensors(
    where: str, config: ModelConfig, stored: dict[str, StoredTensor], names_of: Callable[[str], list[str]]
) -> Named:
    """The stored tensors under our names; `names_of` gives the foreign names (one, or one an expert) of each of ours.

    Raises UserError that names what is missing, left over or of another shape than the config says.
    """
    missing, misshapen, used, matched = [], [], set(), []
    for name, shape in our_shapes(config).items():
        foreign = names_of(name)
        used.update(foreign)
        absent = [other for other in foreign if other not in stored]
        if absent:
            missing += absent
            continue
        parts = [stored[other] for other in foreign]
        wrong = [
            f"{other} is {list(part.shape)} instead of {list(shape if len(parts) == 1 else shape[1:])}"
            for other, part in zip(foreign, parts, strict=True)
            if part.shape != (shape if len(parts) == 1 else shape[1:])
        ]
        misshapen += wrong
        if not wrong:
            matched.append((name, parts[0] if len(parts) == 1 else stacked(parts)))
    left = [name if name.isprintable() else ascii(name) for name in sorted(stored.keys() - used)]
    faults = [f"{name} is missing" for name in missing] + [f"{name[:100]} is unknown" for name in left] + misshapen
    if faults:
        raise UserError(
            f"{where} does not hold the tensors that its config describes: {', '.join(faults[:4])}"
            f"{f' and {len(faults) - 4} more' if len(faults) > 4 else ''}; fetch it again or use another"
        )
    return matched
