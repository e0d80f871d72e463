"""What an engine is built with, and how many pages its cache gets."""

from dataclasses import dataclass, replace

import torch

from configs.errors import UserError, check_positive
from llm.args import ModelConfig

CPU_CACHE_BYTES = 2**30  # at most, where nobody says how many pages


@dataclass
class EngineConfig:
    """page_size: tokens a page, a power of two from 16 up where the Triton kernels run; only full pages are shared.
        None: 128 on a GPU, a whole tile of the decode kernel, and 32 elsewhere.
    num_pages: of the cache; None: on a GPU `memory_fraction` of what is free when the engine is made, never more than
        max_running requests of full length could fill; on a CPU at most 1 GiB.
    max_running: requests that share a step. prefill_chunk: prompt tokens a step, beside the decoding ones.
    prefix_sharing: keep full pages to be found by requests with the same beginning.
    cuda_graph: replay decoding steps as CUDA graphs (no effect on a CPU).
    cpu_kernel: decode float32 models on a CPU by kernel/decode_cpu, which a C++ compiler builds at first use.
    batch_invariant: a token's numbers do not depend on what shares its step, to the last bit; slower (docs/engine.md).
    num_ids: ids from here up are never chosen; a model's vocabulary is padded beyond the tokenizer's. None: all.
    fuse: join the weights that read one input, in place, and use the fused kernels on a GPU; names, shapes and values
        of the parameters stay. Set it to False for a model whose storage belongs to somebody else (FSDP).
    max_seq_len: prompt and completion together; None: the model's.
    """

    page_size: int | None = None
    num_pages: int | None = None
    memory_fraction: float = 0.8
    max_running: int = 64
    prefill_chunk: int = 2048
    prefix_sharing: bool = True
    cuda_graph: bool = True
    cpu_kernel: bool = True
    batch_invariant: bool = False
    num_ids: int | None = None
    fuse: bool = True
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        check_positive(
            page_size=self.page_size or 1, max_running=self.max_running, prefill_chunk=self.prefill_chunk,
            num_pages=self.num_pages or 1, max_seq_len=self.max_seq_len or 1, num_ids=self.num_ids or 1,
        )  # fmt: skip
        if not 0.0 < self.memory_fraction <= 1.0:
            raise UserError(f"memory_fraction={self.memory_fraction} must lie in (0, 1]; use 0.8")

    def for_device(self, device: torch.device) -> "EngineConfig":
        """This config with page_size filled in."""
        return replace(self, page_size=self.page_size or (128 if device.type == "cuda" else 32))

    def sequence_limit(self, model: ModelConfig) -> int:
        """Tokens that a prompt and its completion may have together."""
        if self.max_seq_len is not None and self.max_seq_len > model.max_seq_len:
            raise UserError(
                f"max_seq_len={self.max_seq_len} must not exceed the model's max_seq_len={model.max_seq_len}; lower it"
            )
        return self.max_seq_len or model.max_seq_len

    def count_pages(self, model: ModelConfig, bytes_per_page: int, device: torch.device) -> int:
        """Pages of the cache, page 0 included, which no request gets."""
        if self.num_pages is not None:
            return self.num_pages + 1
        full = self.max_running * -(-self.sequence_limit(model) // self.page_size)
        room = CPU_CACHE_BYTES
        if device.type == "cuda":
            room = int(torch.cuda.mem_get_info(device)[0] * self.memory_fraction)
        pages = min(full, room // bytes_per_page)
        if pages < 1:
            raise UserError(
                f"a page of page_size={self.page_size} takes {bytes_per_page:,} bytes and {room:,} are free; "
                f"free memory or lower page_size"
            )
        return pages + 1
