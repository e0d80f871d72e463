"""A checkpoint of a run with adapters, read as the plain model's: merged weight by weight, one in memory at a time."""

from torch import Tensor

from llm.lora import LoraConfig, is_adapter, merge
from parallel.sharded_checkpoint_files import CheckpointReader
from parallel.sharded_checkpoint_pieces import Box


class MergingReader:
    """What loading asks of a CheckpointReader; `lora` is the config of the run that saved it."""

    def __init__(self, reader: CheckpointReader, lora: LoraConfig):
        self.reader, self.lora, self.directory = reader, lora, reader.directory
        self.index = {name: entry for name, entry in reader.index.items() if not is_adapter(name)}

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self.index if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.shape(name)

    def fill(self, box: Box) -> None:
        """Copy the values of the plain model into `box.values`, on any device and in any float dtype."""
        layer, _, kind = box.name.rpartition(".")
        if kind != "weight" or f"{layer}.lora_a" not in self.reader.index:
            self.reader.fill(box)
            return
        place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))
        box.values.copy_(self.merged(layer)[place])

    def merged(self, layer: str) -> Tensor:
        names = [f"{layer}.{kind}" for kind in ("weight", "lora_a", "lora_b")]
        return merge({name: self.reader.full(name) for name in names}, self.lora)[names[0]]
