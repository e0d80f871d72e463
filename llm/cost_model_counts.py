"""What a model's shape alone says: its parameters, exactly, and its matrix-multiply FLOPs per token.

Counting rules: matrix multiplications only, 2 FLOPs a multiply-add; causal attention counts half of its T x T scores;
the output layer counts, the embedding look-up does not; training is three times forward; recomputation is not counted.
"""

from dataclasses import dataclass, field, replace

from llm.args import KernelsConfig, ModelConfig, TrainConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part; `output` is 0 when tied. `active` are those that one token passes through."""

    embedding: int
    attention: int
    ffn: int  # router included
    norms: int
    output: int
    active: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.ffn + self.norms + self.output


@dataclass(frozen=True)
class Matrix:
    """One matrix multiplication of a block, as the tokens that pass it see it: (rows, inputs) x (inputs, outputs)."""

    name: str
    inputs: int
    outputs: int
    calls: int = 1  # parallel copies a token passes: the experts that it chose

    @property
    def flops_per_token(self) -> int:
        return 2 * self.calls * self.inputs * self.outputs


def query_width(model: ModelConfig) -> int:
    """H * D, the width of the queries and of attention's output."""
    return model.num_heads * model.head_dim


def kv_width(model: ModelConfig) -> int:
    """K * D, the width of the keys and of the values."""
    return model.num_kv_heads * model.head_dim


def attention_matrices(model: ModelConfig) -> list[Matrix]:
    C, Q, K = model.d_model, query_width(model), kv_width(model)
    return [Matrix("q_proj", C, Q), Matrix("k_proj", C, K), Matrix("v_proj", C, K), Matrix("o_proj", Q, C)]


def ffn_matrices(model: ModelConfig) -> list[Matrix]:
    C, moe = model.d_model, model.moe
    if not moe.num_experts:
        return [
            Matrix("gate_proj", C, model.d_ff),
            Matrix("up_proj", C, model.d_ff),
            Matrix("down_proj", model.d_ff, C),
        ]
    F, k = moe.d_ff, moe.experts_per_token
    experts = [Matrix("gate_proj", C, F, k), Matrix("up_proj", C, F, k), Matrix("down_proj", F, C, k)]
    return [Matrix("router", C, moe.num_experts), *experts]


def block_matrices(model: ModelConfig) -> list[Matrix]:
    """Every projection of one block; attention's own products are counted by `attention_flops_per_token`."""
    return attention_matrices(model) + ffn_matrices(model)


def output_matrix(model: ModelConfig) -> Matrix:
    return Matrix("output", model.d_model, model.vocab_size)


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Exact for any ModelConfig whose vocab_size is filled in."""
    L, C, D, moe = model.num_layers, model.d_model, model.head_dim, model.moe
    attention = sum(matrix.inputs * matrix.outputs for matrix in attention_matrices(model))
    if model.qkv_bias:
        attention += query_width(model) + 2 * kv_width(model)
    passed = sum(matrix.inputs * matrix.outputs * matrix.calls for matrix in ffn_matrices(model))
    held = passed
    if moe.num_experts:
        all_experts = replace(moe, experts_per_token=moe.num_experts)
        held = sum(m.inputs * m.outputs * m.calls for m in ffn_matrices(replace(model, moe=all_experts)))
    norms = 2 * C + (2 * D if model.qk_norm else 0)
    embedding = model.vocab_size * C
    output = 0 if model.tie_embeddings else embedding
    count = ParameterCount(embedding, L * attention, L * held, L * norms + C, output, active=0)
    return replace(count, active=count.total - L * (held - passed))


def attention_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """q k^T and p v of one block, forward, half of seq_len keys a query: 2 products x 2 x H D x seq_len / 2."""
    return 2 * query_width(model) * seq_len


def forward_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """FLOPs of one token in a sequence of seq_len tokens."""
    block = sum(matrix.flops_per_token for matrix in block_matrices(model))
    block += attention_flops_per_token(model, seq_len)
    return model.num_layers * block + output_matrix(model).flops_per_token


def train_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Forward once, and twice as much for the gradients of inputs and of weights."""
    return 3 * forward_flops_per_token(model, seq_len)


@dataclass(frozen=True)
class RankPart:
    """What one rank computes where ranks share a model; the widths that tensor parallelism leaves it are ModelConfig's.

    The defaults are those of a rank that does everything.
    """

    layers: int | None = None  # blocks of its pipeline stages; None: the model's
    has_embedding: bool = True
    has_head: bool = True  # the last norm, the output layer and the loss
    tensor_ranks: int = 1  # that share each layer's matrices
    tensor_chunks: int = 1  # pieces in which a block's tokens cross between them
    stream_ranks: int = 1  # over which tokens are cut between the layers (sequence parallelism)
    context_ranks: int = 1  # over which each sequence is cut
    context_mode: str = "ring"
    adds_in_products: bool = False  # products add to gradients: a pipeline's graphs, and W where no hooks wait
    casts_once: bool = False  # a pipeline's graphs: weights to bfloat16 once a step
    casts_norms: bool = False  # norms' weights are gathered in bfloat16, and so is what they write


@dataclass(frozen=True)
class Workload:
    """One optimizer step on one device, as plain numbers: what memory and time are predicted for."""

    model: ModelConfig
    micro_batch_size: int
    seq_len: int
    optimizer: str = "adamw"
    grad_accum_steps: int = 1
    device: str = "cpu"
    dtype: str = "float32"  # bfloat16: autocast over float32 weights
    compile: str = "none"
    document_masking: bool = False
    world_size: int = 1
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    part: RankPart = field(default_factory=RankPart)

    def fuses(self, operation: str) -> bool:
        """Whether `operation` is one of our fused kernels; a compiled model keeps its projections."""
        return (
            operation != "" and self.kernels.uses(operation) and not (operation == "linear" and self.compile != "none")
        )

    @property
    def tokens(self) -> int:
        """N, the tokens of one micro-batch on one device."""
        return self.micro_batch_size * self.row_tokens

    @property
    def row_tokens(self) -> int:
        """Tokens of one sequence on one device."""
        return self.seq_len // self.part.context_ranks

    @property
    def stream_tokens(self) -> float:
        """Tokens of one micro-batch that this device has between the layers."""
        return self.tokens / self.part.stream_ranks

    @property
    def layers(self) -> int:
        """Blocks that this device runs."""
        return self.model.num_layers if self.part.layers is None else self.part.layers

    @property
    def output_elements(self) -> int:
        """Of the output layer's matrix, which under tied embeddings is the table's; 0 where another rank has it."""
        return self.model.vocab_size * self.model.d_model if self.part.has_head else 0

    @property
    def parameters(self) -> ParameterCount:
        """Those that this device holds; a pipeline's tied table is its first rank's."""
        count, layers, part = count_parameters(self.model), self.model.num_layers, self.part
        attention, ffn = (total // layers * self.layers for total in (count.attention, count.ffn))
        norms = (count.norms - self.model.d_model) // layers * self.layers
        return ParameterCount(
            embedding=count.embedding if part.has_embedding else 0,
            attention=attention,
            ffn=ffn,
            norms=norms + (self.model.d_model if part.has_head else 0),
            output=count.output if part.has_head else 0,
            active=0,
        )

    @property
    def global_tokens(self) -> int:
        return self.tokens * self.grad_accum_steps * self.world_size


def workload_of(config: TrainConfig, device: str, world_size: int = 1) -> Workload:
    """The workload of a resolved TrainConfig (model.vocab_size filled in) on a "cpu" or "cuda" device."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return Workload(
        config.model, config.micro_batch_size, config.data.seq_len, config.optimizer.name,
        config.grad_accum_steps(world_size), device, dtype, config.compile, config.data.document_masking, world_size,
        config.kernels,
    )  # fmt: skip
