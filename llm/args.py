"""What a run is, as typed dataclasses: the schemas that configs/*.yaml are merged into.

Each schema checks its own values when it is built, so a wrong number fails at start with one line. OptimizerConfig
and ScheduleConfig stand beside the code that they configure.
"""

from dataclasses import dataclass, field, replace

from configs.errors import UserError, check_choice, check_positive
from llm.lora import LoraConfig
from llm.optimizer import OptimizerConfig
from llm.schedule import ScheduleConfig
from parallel.activation_checkpointing import MODES as CHECKPOINTING
from parallel.collectives_peer import TRANSPORTS
from parallel.context_parallel_layout import MODES as CONTEXT_MODES
from parallel.mesh_degrees import Degrees
from parallel.pipeline_schedules import SCHEDULES

ATTENTION_BACKENDS = ("sdpa", "eager", "mock", "triton")


@dataclass
class RopeScaling:
    """Llama 3's stretch of the low RoPE frequencies to a longer context (Llama 3 report, section 3.4.2)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}; Llama 3 uses 4.0 and 1.0"
            )


@dataclass
class MoeConfig:
    """Replaces the dense feed-forward of every block when num_experts > 0."""

    num_experts: int = 0
    experts_per_token: int = 2
    d_ff: int = 0  # hidden width of one expert
    normalise_top_k: bool = True  # the chosen experts' weights sum to 1 (Mixtral, Qwen3-MoE)

    def __post_init__(self) -> None:
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"moe.experts_per_token={self.experts_per_token} must lie in 1..num_experts={self.num_experts}"
            )
        if self.num_experts and self.d_ff <= 0:
            raise UserError(f"moe.d_ff={self.d_ff} must be positive when num_experts={self.num_experts}")


@dataclass
class ModelConfig:
    """The shape of a decoder-only Transformer; LLaMA, Qwen, SmolLM and Mixtral differ by these numbers alone."""

    vocab_size: int | None = None  # null: the tokenizer's, rounded up to a multiple of 64
    max_seq_len: int = 1024
    d_model: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int | None = None  # null: num_heads
    head_dim: int | None = None  # null: d_model / num_heads
    d_ff: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    attention: str = "sdpa"
    moe: MoeConfig = field(default_factory=MoeConfig)

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_heads
        check_positive(
            max_seq_len=self.max_seq_len, d_model=self.d_model, num_layers=self.num_layers, d_ff=self.d_ff,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, rope_theta=self.rope_theta,
        )  # fmt: skip
        check_choice("model.attention", self.attention, ATTENTION_BACKENDS)
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UserError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}; use one of {divisors}"
            )
        if self.head_dim is None:
            if self.d_model % self.num_heads:
                raise UserError(
                    f"num_heads={self.num_heads} must divide d_model={self.d_model} unless head_dim is given; "
                    f"change one of them or set model.head_dim"
                )
            self.head_dim = self.d_model // self.num_heads
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} must be even, since RoPE turns pairs; use {self.head_dim + 1}")

    def with_vocab_of(self, tokenizer_vocab_size: int) -> "ModelConfig":
        """This shape with vocab_size filled in, or checked to hold every id of the tokenizer."""
        if self.vocab_size is None:
            return replace(self, vocab_size=-(-tokenizer_vocab_size // 64) * 64)
        if self.vocab_size < tokenizer_vocab_size:
            raise UserError(
                f"model.vocab_size={self.vocab_size} is smaller than the tokenizer's {tokenizer_vocab_size}; "
                f"raise it or leave it null"
            )
        return self


@dataclass
class DataConfig:
    """Where the tokens are and how windows are drawn from them."""

    tokens: str = "???"  # a directory of source directories, or one source directory (llm.tokenize_corpus writes it)
    tokenizer: str = "???"  # its hash must be the one that the tokens were made with
    weights: dict[str, float] = field(default_factory=dict)  # share of each source; empty: by number of tokens
    seq_len: int = 1024
    order: str = "random"
    document_masking: bool = False

    def __post_init__(self) -> None:
        check_positive(**{"data.seq_len": self.seq_len})
        check_choice("data.order", self.order, ("random", "epoch"))


@dataclass
class ParallelConfig:
    """Degrees of each kind of parallelism, and how gradients, optimizer and parameters lie over the data ranks.

    zero: 0 keeps everything on every rank (DDP), 1 shards the optimizer's state, 2 gradients too, 3 parameters too.
    """

    dp: int | None = None  # ranks that see different data; null: what the other axes leave of the world
    dp_shard: int | None = None  # of them, ranks that share one copy of what zero shards; null: all, or 1 at zero=0
    tp: int = 1
    tp_chunks: int = 1  # tokens cross a tp rank's layers in so many pieces, transfers beside products (async TP)
    sequence_parallel: bool = True  # between a tp rank's layers the tokens are cut over the ranks, not held by all
    pp: int = 1
    pp_schedule: str = "1f1b"  # or gpipe, interleaved, zero_bubble (docs/pipeline_parallel.md)
    pp_chunks: int = 1  # stages on each pp rank; 2 or more with interleaved
    cp: int = 1
    cp_mode: str = "ring"  # attention over cp ranks: keys in a ring, or "all_gather" (of keys), or "ulysses" (heads)
    cp_pad: bool = True  # pad sequences that do not divide over cp; false refuses them
    ep: int = 1  # folds over dp x cp
    zero: int = 0
    ddp_mode: str = "bucketed"  # or "naive": one all-reduce a parameter after backward
    bucket_mb: float = 25.0  # of gradients in one reduction
    first_bucket_mb: float = 1.0  # small, so that the first reduction starts early
    reduce_dtype: str | None = None  # of gradients on the wire: float32 or bfloat16; null: the gradients' own
    # What moves the buckets of zero=0 and 1: the backend (nccl, gloo), or "peer": GPUs of one host read each other's
    # memory by copy engines, which leaves their processors to the model.
    transport: str = "backend"
    # zero=2, 3: true reduces gradients after each micro-batch, false keeps them in full, then once. null: true, but
    # false for zero=2 with pp, which has many small micro-batches and keeps parameters for the step too.
    reduce_each_micro_batch: bool | None = None
    activation_checkpointing: str = "none"  # "selective": keep matrix products and attention; "full": a block's input
    force: bool = False  # run hooks, buckets and collectives on a single rank too, to measure them
    timeout_s: float = 600.0  # a collective that takes longer ends the run with the ranks that are missing

    def __post_init__(self) -> None:
        check_positive(**{f"parallel.{name}": getattr(self, name) for name in ("bucket_mb", "first_bucket_mb")})
        check_positive(**{"parallel.timeout_s": self.timeout_s, "parallel.tp_chunks": self.tp_chunks})
        check_choice("parallel.ddp_mode", self.ddp_mode, ("bucketed", "naive"))
        self.check_transport()
        check_choice("parallel.pp_schedule", self.pp_schedule, SCHEDULES)
        check_positive(**{"parallel.pp_chunks": self.pp_chunks})
        check_choice("parallel.cp_mode", self.cp_mode, CONTEXT_MODES)
        check_choice("parallel.activation_checkpointing", self.activation_checkpointing, CHECKPOINTING)
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"parallel.zero={self.zero} must be 0, 1, 2 or 3")
        if self.reduce_dtype is not None:
            check_choice("parallel.reduce_dtype", self.reduce_dtype, ("float32", "bfloat16"))
        if self.zero == 0 and self.dp_shard not in (None, 1):
            raise UserError(
                f"parallel.dp_shard={self.dp_shard} needs something to shard; set parallel.zero to 1, 2 or 3"
            )

    def check_transport(self) -> None:
        check_choice("parallel.transport", self.transport, TRANSPORTS)
        if self.transport == "peer" and (self.zero > 1 or self.ddp_mode == "naive"):
            setting = f"zero={self.zero}" if self.zero > 1 else "ddp_mode=naive"
            raise UserError(
                f"parallel.transport=peer moves buckets of gradients, which parallel.{setting} does not have; "
                f"use zero=0 or 1 with ddp_mode=bucketed, or transport=backend"
            )

    @property
    def reduces_each_micro_batch(self) -> bool:
        """`reduce_each_micro_batch` with its null filled in."""
        chosen = self.reduce_each_micro_batch
        return (self.pp == 1 or self.zero == 3) if chosen is None else chosen

    def degrees(self) -> Degrees:
        """The mesh's degrees; dp may still be null, which the mesh fills in from the world size."""
        dp_shard = 1 if self.zero == 0 else self.dp_shard
        return Degrees(self.dp, dp_shard, cp=self.cp, tp=self.tp, pp=self.pp, ep=self.ep)

    def check(self, world_size: int) -> None:
        self.degrees().resolve(world_size)


@dataclass
class KernelsConfig:
    """Which operations run as our fused Triton kernels (a GPU is needed); null follows `fused`.

    model.attention chooses the attention kernel on its own.
    """

    fused: bool = False
    embedding: bool | None = None  # the table read in the stream's dtype, its gradient without atomics
    norm: bool | None = None  # RMSNorm with the residual addition before it
    rope: bool | None = None  # queries and keys in one launch
    swiglu: bool | None = None
    linear: bool | None = None  # projections of one input together, weight gradients in the weights' dtype; eager only
    loss: bool | None = None  # output layer and cross-entropy in chunks, without the logits
    optimizer: bool | None = None  # AdamW in one launch, clipping folded in
    loss_chunk_mb: int = 256  # logits that the loss holds at a time
    stream: str | None = None  # dtype of the residual stream under autocast: bfloat16; null: the embedding's
    # forward and backward of a micro-batch as one launch: one rank, dense models; with pp each operation of a stage
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        check_positive(**{"kernels.loss_chunk_mb": self.loss_chunk_mb})
        if self.stream is not None:
            check_choice("kernels.stream", self.stream, ("bfloat16", "float32"))

    def uses(self, operation: str) -> bool:
        """Whether `operation` (embedding, norm, rope, swiglu, linear, loss, optimizer) is fused."""
        own = getattr(self, operation)
        return self.fused if own is None else own


@dataclass
class CheckpointConfig:
    every_steps: int = 1000  # and always at the last step and on SIGTERM
    keep_last: int = 3

    def __post_init__(self) -> None:
        check_positive(**{"checkpoint.every_steps": self.every_steps, "checkpoint.keep_last": self.keep_last})


@dataclass
class TrackingConfig:
    wandb: str = "off"
    project: str = "mew"

    def __post_init__(self) -> None:
        check_choice("tracking.wandb", self.wandb, ("off", "offline", "online"))


@dataclass
class HardwareConfig:
    """A device's dense peaks, from its datasheet (or, for a CPU, measured by llm.hardware_calibration at start)."""

    name: str = "auto"  # auto: the file in configs/hardware/ whose `matches` stands in the device's name
    matches: str = ""
    bf16_flops: float | None = None
    fp32_flops: float | None = None  # on tensor cores: TF32
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    source: str = ""
    gpus_per_node: int = 1
    link_bytes_per_s: float | None = None  # through one GPU in each direction, as a ring of collectives uses it
    link_hop_s: float | None = None  # from one GPU of a node to the next
    network_bytes_per_s: float | None = None  # of one GPU's port between nodes
    network_hop_s: float | None = None
    call_s: float | None = None  # of starting a collective
    # That a computation loses to a byte sent beside it (bench_mark_contention); null: not measured, taken as none.
    beside_s_per_byte: float | None = None
    beside_peer_s_per_byte: float | None = None  # the same where parallel.transport=peer moves it
    link_source: str = ""


@dataclass
class TrainConfig:
    """Everything that `python -m llm.training` takes."""

    name: str = "???"
    runs_dir: str = "runs"
    resume: str = "auto"  # auto: the newest whole checkpoint of this run, else a fresh start; or "none"
    init_from: str | None = None  # weights that a fresh start begins with: a run, or a checkpoint's directory
    seed: int = 1337
    device: str = "auto"
    dtype: str = "auto"  # matmul inputs: bfloat16 autocast on a GPU, float32 on a CPU; weights are float32
    compile: str = "none"  # none, block (each block on its own) or model
    max_steps: int = 1000
    max_time_s: float | None = None  # stop, saved and whole, after this long
    micro_batch_size: int = 8  # sequences a rank takes through the model at once
    global_batch_tokens: int = 8192
    z_loss: float = 0.0
    log_every: int = 10
    validate_every: int = 250
    validation_tokens: int = 262_144  # at most this many of the validation split, the same at each validation
    sample_tokens: int = 64
    sample_prompt: str = ""
    profile: bool = False  # trace, module ranges and memory report of a few steps (docs/profiling.md)
    profile_start: int = 5  # steps of this process before the profiled ones: compilation, graphs, the optimizer's state
    profile_steps: int = 2  # in the trace; one step of warm-up goes before them, and one for the memory comes after
    profile_tool: str = "torch"  # torch.profiler, or "nsys": ranges alone, for Nsight Systems to record
    model: ModelConfig = "???"  # no default: one whose nulls are filled in would hide a group file's nulls
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_choice("compile", self.compile, ("none", "block", "model"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("resume", self.resume, ("auto", "none"))
        check_choice("profile_tool", self.profile_tool, ("torch", "nsys"))
        check_positive(
            max_steps=self.max_steps, micro_batch_size=self.micro_batch_size, log_every=self.log_every,
            global_batch_tokens=self.global_batch_tokens, validate_every=self.validate_every,
            profile_start=self.profile_start, profile_steps=self.profile_steps,
        )  # fmt: skip
        if self.data.seq_len > self.model.max_seq_len:
            raise UserError(
                f"data.seq_len={self.data.seq_len} must not exceed model.max_seq_len={self.model.max_seq_len}; "
                f"raise model.max_seq_len"
            )

    def grad_accum_steps(self, world_size: int) -> int:
        """Micro-batches a rank runs in one optimizer step."""
        tokens = self.micro_batch_size * self.data.seq_len * world_size
        if self.global_batch_tokens % tokens:
            raise UserError(
                f"global_batch_tokens={self.global_batch_tokens} must be a multiple of micro_batch_size x seq_len x "
                f"ranks = {self.micro_batch_size} x {self.data.seq_len} x {world_size} = {tokens}; "
                f"use {max(1, round(self.global_batch_tokens / tokens)) * tokens}"
            )
        return self.global_batch_tokens // tokens
