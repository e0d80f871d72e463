"""A layout as it stands on the command line, "dp=2,zero=3", and the grid that runs without one."""

from dataclasses import dataclass, fields, replace
from typing import Any

from configs.errors import UserError
from llm.args import ParallelConfig
from parallel.mesh_degrees import Degrees

# Small enough that the harness' tiny model has several buckets.
SMALL_BUCKETS = {"bucket_mb": 0.006, "first_bucket_mb": 0.001}


@dataclass(frozen=True)
class Layout:
    """Degrees and settings of one run: fields of ParallelConfig."""

    text: str
    settings: tuple[tuple[str, Any], ...]

    def config(self) -> ParallelConfig:
        return ParallelConfig(**SMALL_BUCKETS | dict(self.settings))

    @property
    def world_size(self) -> int:
        config = self.config()
        return (config.dp or 1) * config.cp * config.tp * config.pp

    def degrees(self) -> Degrees:
        return self.config().degrees().resolve(self.world_size)


def parse_layout(text: str) -> Layout:
    """ "dp=2,zero=3" -> Layout; UserError for an unknown name or a value of the wrong type."""
    known = {field.name: field for field in fields(ParallelConfig)}
    settings = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name not in known or not value:
            raise UserError(f"--layout {text!r}: {part!r} is no setting; use name=value with names of {sorted(known)}")
        settings[name] = parse_value(name, value)
    return Layout(text, tuple(settings.items()))


def parse_value(name: str, value: str) -> Any:
    if name in ("ddp_mode", "reduce_dtype", "activation_checkpointing", "cp_mode", "pp_schedule", "transport"):
        return value
    if name in ("force", "reduce_each_micro_batch", "sequence_parallel", "cp_pad"):
        return value == "true"
    try:
        return float(value) if name.endswith(("_mb", "_s")) else int(value)
    except ValueError as error:
        raise UserError(f"--layout: {name}={value!r} must be a number") from error


def layouts(*texts: str) -> list[Layout]:
    return [parse_layout(text) for text in texts]


def forced(layout: Layout) -> Layout:
    """The same on a single rank, with hooks and collectives over a group of one."""
    settings = {name: value for name, value in layout.settings if name not in ("dp", "dp_shard")}
    text = f"{layout.text} on one rank"
    return replace(layout, text=text, settings=tuple((settings | {"dp": 1, "force": True}).items()))


DEFAULT_GRID = layouts(
    "dp=1", "dp=1,force=true", "dp=2", "dp=2,ddp_mode=naive", "dp=2,reduce_dtype=bfloat16", "dp=3",
    "dp=3,transport=peer", "dp=2,zero=1,transport=peer",
    "dp=2,zero=1", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=3,zero=3", "dp=4,dp_shard=2,zero=3",
    "dp=2,zero=3,activation_checkpointing=full", "dp=1,zero=3,force=true",
    "tp=2", "tp=2,sequence_parallel=false", "tp=4", "tp=2,tp_chunks=2", "dp=2,tp=2", "dp=2,tp=2,zero=1",
    "tp=2,pp=2", "tp=2,cp=2",
    "dp=2,tp=2,zero=3",
    "cp=2", "cp=3", "cp=2,zero=3", "dp=2,cp=2,cp_mode=all_gather", "cp=4,cp_mode=ulysses", "cp=2,tp=2,zero=1",
    "cp=2,pp=2",
    "pp=2", "pp=2,pp_schedule=interleaved,pp_chunks=2", "pp=2,pp_schedule=zero_bubble", "pp=4,pp_schedule=gpipe",
    "pp=2,dp=2,zero=1", "dp=2,pp=2,zero=2", "dp=2,pp=2,zero=3",
)  # fmt: skip
SLOW_GRID = layouts(
    "dp=2,transport=peer", "dp=8,transport=peer", "dp=2,transport=peer,reduce_dtype=bfloat16",
    "dp=3,zero=1,transport=peer",
    "dp=4,dp_shard=2,zero=1,transport=peer", "cp=2,transport=peer", "dp=2,cp=2,zero=1,transport=peer",
    "dp=2,tp=2,transport=peer", "dp=2,pp=2,transport=peer", "dp=2,pp=2,zero=1,transport=peer,pp_schedule=zero_bubble",
    "dp=1,transport=peer,force=true", "dp=1,zero=1,transport=peer,force=true",
    "dp=4", "dp=8", "dp=4,ddp_mode=naive", "dp=2,bucket_mb=25", "dp=2,first_bucket_mb=0.0001,bucket_mb=0.0001",
    "dp=1,zero=1,force=true", "dp=4,zero=1", "dp=8,zero=1", "dp=4,dp_shard=2,zero=1", "dp=2,zero=1,bucket_mb=25",
    "dp=3,zero=2", "dp=4,zero=2", "dp=8,zero=2", "dp=4,dp_shard=2,zero=2", "dp=4,zero=3", "dp=8,zero=3",
    "dp=8,dp_shard=4,zero=3", "dp=2,zero=2,reduce_dtype=bfloat16", "dp=2,zero=3,reduce_dtype=bfloat16",
    "dp=2,zero=2,activation_checkpointing=selective", "dp=3,activation_checkpointing=full",
    "tp=4,sequence_parallel=false", "dp=2,tp=4", "dp=4,tp=2,dp_shard=2,zero=3", "tp=2,zero=1", "dp=2,tp=2,zero=2",
    "tp=2,activation_checkpointing=full", "tp=2,activation_checkpointing=selective", "dp=2,tp=4,zero=1",
    "dp=2,tp=2,pp=2,zero=1,pp_schedule=zero_bubble",
    "dp=2,tp=2,pp=2,zero=1", "tp=2,pp=2,sequence_parallel=false", "tp=2,cp=2,pp=2",
    "tp=2,pp=2,pp_schedule=zero_bubble", "dp=2,tp=2,cp=2,zero=3",
    "tp=4,tp_chunks=2", "tp=2,tp_chunks=4,activation_checkpointing=full", "dp=2,tp=2,tp_chunks=2,zero=3",
    "cp=4", "cp=8", "dp=2,cp=2", "cp=2,zero=1", "dp=2,cp=2,zero=2", "dp=2,cp=4,dp_shard=1,zero=3",
    "dp=2,cp=2,tp=2,zero=3", "cp=2,activation_checkpointing=full", "cp=2,activation_checkpointing=selective",
    "cp=2,tp=4", "cp=4,tp=2", "cp=2,cp_mode=ulysses", "cp=2,tp=2,cp_mode=ulysses", "cp=3,cp_mode=all_gather",
    "cp=4,cp_mode=all_gather,zero=3", "cp=2,cp_mode=all_gather,activation_checkpointing=full",
    "cp=2,cp_mode=ulysses,activation_checkpointing=full",
    "pp=2,pp_schedule=gpipe", "pp=4", "pp=4,pp_schedule=zero_bubble", "pp=2,dp=2", "pp=2,dp=3,zero=1",
    "pp=2,dp=2,pp_schedule=zero_bubble", "pp=2,dp=2,zero=1,pp_schedule=zero_bubble", "pp=2,zero=1",
    "pp=2,activation_checkpointing=full", "pp=2,pp_schedule=zero_bubble,activation_checkpointing=full",
    "pp=2,dp=2,zero=1,pp_schedule=interleaved,pp_chunks=2", "pp=3", "pp=2,pp_schedule=zero_bubble_h2",
    "pp=4,dp=2,zero=1,pp_schedule=zero_bubble_h2", "pp=2,dp=2,zero=3,pp_schedule=zero_bubble_h2",
    "dp=2,cp=2,pp=2,zero=1", "cp=2,pp=2,pp_schedule=zero_bubble,zero=1", "cp=2,pp=2,cp_mode=ulysses",
    "dp=2,pp=2,zero=2,reduce_each_micro_batch=true", "dp=2,pp=2,zero=3,reduce_each_micro_batch=false",
    "dp=2,pp=2,zero=2,pp_schedule=gpipe", "dp=2,pp=2,zero=3,pp_schedule=gpipe",
    "dp=2,pp=2,zero=2,pp_schedule=interleaved,pp_chunks=2", "dp=2,pp=2,zero=3,pp_schedule=interleaved,pp_chunks=2",
    "dp=2,pp=2,zero=2,pp_schedule=zero_bubble", "dp=2,pp=2,zero=3,pp_schedule=zero_bubble",
    "dp=2,pp=2,zero=3,pp_schedule=zero_bubble_h2",
    "dp=2,pp=4,zero=2", "dp=2,pp=4,zero=3", "dp=2,pp=3,zero=3,pp_schedule=zero_bubble", "dp=3,pp=2,zero=3",
    "dp=4,pp=2,dp_shard=2,zero=2", "dp=4,pp=2,dp_shard=2,zero=3", "dp=2,pp=2,zero=3,reduce_dtype=bfloat16",
    "dp=2,pp=2,zero=3,activation_checkpointing=full", "dp=2,pp=2,zero=2,activation_checkpointing=selective",
    "dp=2,tp=2,pp=2,zero=2", "dp=2,tp=2,pp=2,zero=3", "dp=2,tp=2,pp=2,zero=3,pp_schedule=zero_bubble",
    "tp=2,pp=2,tp_chunks=2,pp_schedule=zero_bubble", "dp=2,tp=2,pp=2,tp_chunks=2,zero=3,pp_schedule=zero_bubble",
    "cp=2,pp=2,zero=2", "dp=2,cp=2,pp=2,zero=3", "cp=2,tp=2,pp=2,zero=3", "cp=2,pp=2,zero=3,cp_mode=ulysses",
)  # fmt: skip
