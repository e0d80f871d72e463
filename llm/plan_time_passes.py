"""What ZeRO-2 and 3 add to the passes of a pipeline rank and to the ends of its step, in seconds.

Within a pass a block's messages run beside the block before it, so a pass takes as long as the longer of its products
and its messages. Outside stand the first gathers of a step, and the reductions for which no backward pass is left.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from parallel.cost_model_traffic import DataLayout, Message
from parallel.pipeline_schedules_simulation import Durations

Seconds = Callable[[Message], float]


@dataclass(frozen=True)
class PassMessages:
    """The messages over the data ranks of one micro-batch on one rank, under ZeRO-2 or 3; `layers` of the model."""

    messages: tuple[Message, ...]
    layout: DataLayout
    layers: int
    splits: bool  # weight gradients come in W

    @staticmethod
    def of(messages: list[Message], layout: DataLayout, layers: int, splits: bool) -> "PassMessages | None":
        """None under other strategies, which send everything after the last pass."""
        own = tuple(m for m in messages if m.axis.startswith("dp") and m.phase in ("forward", "backward"))
        return PassMessages(own, layout, layers, splits) if layout.is_fsdp and own else None

    def seconds(self, seconds_of: Seconds, pieces: range, gathers: bool, phase: str | None = None) -> float:
        """Of the gathers, or the reductions, of what lies in these pieces."""
        return sum(
            seconds_of(m)
            for m in self.messages
            if m.stage in pieces and (m.op == "all_gather") == gathers and phase in (None, m.phase)
        )

    def blocks(self, pieces: range) -> range:
        return range(max(pieces.start, 1), min(pieces.stop, self.layers + 1))

    def longer(self, durations: Durations, pieces: range, seconds_of: Seconds) -> Durations:
        """A stage's passes with their messages beside them."""
        blocks, again = self.blocks(pieces), self.layout.zero == 3
        forward = self.seconds(seconds_of, blocks, True, "forward") if again else 0.0
        backward = self.seconds(seconds_of, blocks, True, "backward") if again else 0.0
        sent = self.seconds(seconds_of, pieces, False) if self.layout.reduce_each_micro_batch else 0.0
        inputs, weights = durations.input_gradient, durations.weight_gradient
        if self.splits:
            inputs, weights = max(inputs, backward), max(weights, sent)
        else:
            inputs += max(0.0, backward + sent - inputs - weights)
        forward = max(durations.forward, forward)
        return replace(durations, forward=forward, input_gradient=inputs, weight_gradient=weights)

    def before(self, durations: Durations, pieces: range, seconds_of: Seconds) -> float:
        """Until the first pass of a stage can begin, and under ZeRO-2 for what its products do not hide."""
        blocks = self.blocks(pieces)
        root = sum(seconds_of(m) for m in self.messages if m.op == "all_gather" and not self.is_of_block(m))
        first = self.seconds(seconds_of, blocks[:1], True, "forward")
        hidden = self.seconds(seconds_of, blocks[1:], True, "forward") if self.layout.zero == 2 else 0.0
        return root + first + max(0.0, hidden - durations.forward)

    def after(self, first: Durations, pieces: range, seconds_of: Seconds) -> float:
        """Reductions that nothing hides: the root's, and of a rank's first stage, which is the last to go backward and
        has these pieces, the first block's; of all its blocks where they come with W."""
        sent = [m for m in self.messages if m.op != "all_gather"]
        root = sum(seconds_of(m) for m in sent if not self.is_of_block(m))
        blocks = self.blocks(pieces)
        whole = self.seconds(seconds_of, blocks, False)
        last = whole if self.splits else self.seconds(seconds_of, blocks[:1], False)
        return root + max(last, whole - (0.0 if self.splits else first.input_gradient + first.weight_gradient))

    def is_of_block(self, message: Message) -> bool:
        return 1 <= message.stage <= self.layers
