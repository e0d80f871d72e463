"""The device's side of the engine: tables, settings and last tokens of every slot, and the launch of a planned step.

The host never waits for a token to launch the next step: sampled ids stay on the device in `last_tokens`, where the
next step finds them, and their copies for the host are read one step later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.engine_cache import KERNEL_HEAD_DIMS, DecodeRows, PagedCache, PromptPieces, StepCache
from llm.engine_config import EngineConfig
from llm.engine_few import FewRows, runs_few
from llm.engine_graphs import DecodeGraphs
from llm.engine_graphs_prompt import PromptGraphs
from llm.engine_host import HostSteps, runs_host
from llm.engine_invariant import InvariantSteps
from llm.engine_prompts import prompt_arrays
from llm.engine_sampling import (
    Sampled,
    SamplingMode,
    SlotSettings,
    penalise_rows,
    sample_rows,
    sample_rows_fused,
    setting_numbers,
)
from llm.engine_scheduler import Request, Segment, StepPlan
from llm.engine_single import SingleToken, runs_single
from llm.engine_weights import fuse_model
from llm.sampling import ban_tokens
from llm.transformer import Transformer
from llm.transformer_context import BlockContext
from parallel.collectives import all_reduce_max
from parallel.tensor_parallel import TensorLayout


@dataclass
class Launch:
    """A step under way: its sampled requests in order, and what the host will read of them."""

    requests: list[Request]
    weight_version: int
    packed: Tensor  # (R, 3) float64 on the host: ids, log-probabilities, kept masses
    alternatives: tuple[Tensor, Tensor] | None  # (R, n) ids and log-probabilities on the host
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class EngineRunner:
    """Runs the steps that the scheduler plans. Slot `max_running` is nobody's: padded rows use it."""

    def __init__(self, model: Transformer, config: EngineConfig, tensor_layout: TensorLayout | None = None):
        self.model, self.config = model, config
        if config.fuse:
            fuse_model(model)
        weight = model.output.weight
        self.device, self.dtype = weight.device, compute_dtype(weight)
        self.spare_slot = config.max_running
        self.use_kernels = kernels_run(model, self.device)
        self.max_len = config.sequence_limit(model.config)
        attention = model.blocks["0"].attention
        kv_heads = attention.k_proj.weight.shape[0] // attention.head_dim  # of this rank
        shape = (config.page_size, kv_heads, attention.head_dim)
        bytes_per_page = 2 * model.config.num_layers * int(np.prod(shape)) * self.dtype.itemsize
        self.num_pages = config.count_pages(model.config, bytes_per_page, self.device)
        if tensor_layout is not None:  # ranks plan alike only with as many pages: the least that any has room for
            least = all_reduce_max(torch.tensor([-self.num_pages]), tensor_layout.mesh, tensor_layout.axis)
            self.num_pages = -int(least)
        self.cache = PagedCache(model.config.num_layers, (self.num_pages, *shape), self.dtype, self.device)
        slots, columns = config.max_running + 1, -(-self.max_len // config.page_size)
        self.tables = torch.zeros(slots, columns, dtype=torch.int32, device=self.device)
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.settings = SlotSettings.make(slots, self.device)
        self.seen: Tensor | None = None  # (slots, V) bool, made when a request has a repetition penalty
        self.page_changes: list[tuple[int, int]] = []  # flat index of the tables, page
        self.rope = position_tables(model, self.max_len)
        if not self.use_kernels:
            self.rope = tuple(
                torch.cat(pair, dim=-1)[:, None]
                for pair in zip(
                    (self.rope[0], -self.rope[1]),
                    self.rope,
                    strict=True,
                )
            )  # (S, 1, D) each, as llm.engine_cache.turn takes them
        self.single = SingleToken(self) if self.use_kernels and runs_single(model) else None
        self.few = FewRows(self) if self.use_kernels and runs_few(model) else None
        self.invariant = InvariantSteps(self) if config.batch_invariant else None
        plain = self.invariant is None and tensor_layout is None and config.cpu_kernel and runs_host(model, self.dtype)
        self.host = HostSteps(self, *position_tables(model, self.max_len)) if plain else None
        self.graphs = DecodeGraphs(self) if self.uses_graphs and self.invariant is None else None
        self.prompt_graphs = None if self.graphs is None else PromptGraphs(self)

    @property
    def uses_graphs(self) -> bool:
        """On a GPU, unless told not to; experts ask the host for their numbers of tokens, which a graph cannot do."""
        return self.config.cuda_graph and self.device.type == "cuda" and not self.model.config.moe.num_experts

    def on_page(self, slot: int, column: int, page: int) -> None:
        """A page of a slot, to be sent with the next step."""
        self.page_changes.append((slot * self.tables.shape[1] + column, page))

    def staged(self, values: np.ndarray) -> Tensor:
        """A host array as a tensor that the device can fetch by itself."""
        host = torch.from_numpy(values)
        return host.pin_memory() if self.device.type == "cuda" else host

    def upload(self, values: np.ndarray) -> Tensor:
        """A host array to the device without waiting for it."""
        return self.staged(values).to(self.device, non_blocking=True)

    def prepare(self, admitted: list[Request]) -> None:
        """Send what changed since the last step: pages, and the settings of newly admitted requests."""
        if self.page_changes:
            changes = self.upload(np.array(self.page_changes, dtype=np.int64).T.copy())  # (2, n)
            self.tables.view(-1)[changes[0]] = changes[1].int()
            self.page_changes.clear()
        if not admitted:
            return
        rows = [[request.slot, *setting_numbers(request.params.sampling)] for request in admitted]
        columns = self.upload(np.array(rows, dtype=np.float64).T.copy())  # (6, n)
        self.settings.set(columns[0].long(), columns[1:])
        for request in admitted:
            if request.params.sampling.repetition_penalty != 1.0:
                self.note_prompt(request)

    def note_prompt(self, request: Request) -> None:
        """Mark the tokens that a request has so far in its slot's row of `seen`."""
        if self.seen is None:
            shape = (self.config.max_running + 1, self.model.config.vocab_size)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.seen[request.slot] = False
        self.seen[request.slot, self.upload(np.array(request.known_ids(), dtype=np.int64))] = True

    def launch(self, plan: StepPlan, admitted: list[Request], weight_version: int) -> Launch:
        """Start a step; returns before the device has run it."""
        self.prepare(admitted)
        sampled = plan.sampled
        rows = row_numbers(sampled)  # (3, R)
        if self.replays(plan):
            return self.fetch(self.replay(plan, sampled, rows), sampled, weight_version)
        rows = self.upload(rows)
        if self.host is not None and self.host.takes(plan):
            return self.fetch([self.host.run(sampled, rows)], sampled, weight_version)
        return self.fetch([self.sample(self.logits(plan, rows), sampled, rows)], sampled, weight_version)

    def replays(self, plan: StepPlan) -> bool:
        """Whether graphs can run the whole step."""
        if self.graphs is None or not plan.segments:
            return self.graphs is not None
        return self.prompt_graphs is not None and self.prompt_graphs.takes(plan.segments)

    def replay(self, plan: StepPlan, sampled: list[Request], rows: np.ndarray) -> list[Sampled]:
        """The step as a graph for the decoding rows and one for the pieces of prompts."""
        count, results = len(plan.decode), []
        if plan.decode:
            results.append(self.graphs.run(plan.decode, rows[:, :count]))
        if plan.segments:
            results.append(self.prompt_graphs.run(plan.segments, sampled[count:], rows[:, count:]))
        return results

    def logits(self, plan: StepPlan, rows: Tensor) -> Tensor:
        """Run the model over a step's tokens: the scores (R, V) of the rows that sample, of which `rows` tells."""
        if self.invariant is not None:
            return self.invariant.logits(plan, sampling_rows(plan))
        parts, decode, pieces = [], None, None
        if plan.decode:
            longest = max(request.num_computed for request in plan.decode)
            if self.device.type == "cpu":
                tokens, decode = self.host_decode_inputs(plan.decode, longest)
            else:
                tokens, decode = self.decode_inputs(rows[:, : len(plan.decode)], longest)
            parts.append(tokens)
        if plan.segments:
            tokens, pieces = self.prompt_inputs(plan.segments)
            parts.append(tokens)
        tokens = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]  # (3, N)
        chosen = self.upload(np.array(sampling_rows(plan), dtype=np.int64)) if plan.segments else None
        return self.scores(tokens, decode, pieces, chosen)

    def scores(
        self, tokens: Tensor, decode: DecodeRows | None, pieces: PromptPieces | None, chosen: Tensor | None
    ) -> Tensor:
        """The model over tokens (3, N), ids, positions and places: scores (R, V) of `chosen` (R,) or of all."""
        cache = StepCache(self.cache, tokens[2], decode, pieces, self.rope_of(tokens[1]), self.use_kernels)
        ctx = BlockContext(tokens[1][None], cache=cache, attend=cache.attend, attend_turns=True)
        hidden = self.model.hidden_states(tokens[0][None], ctx)  # (1, N, C)
        if chosen is not None:
            hidden = hidden[:, chosen]  # (1, R, C)
        return self.model.output(hidden)[0]  # (R, V)

    def rope_of(self, positions: Tensor) -> Any:
        """What attention turns tokens at `positions` (N,) by."""
        if not self.use_kernels:
            return tuple(table[positions] for table in self.rope)
        from kernel.rope_cache import RopeTables

        return RopeTables(*self.rope, positions)

    def decode_inputs(self, rows: Tensor, longest: int) -> tuple[Tensor, DecodeRows]:
        """(3, B) ids, positions and places of decoding tokens, from `rows` (3, B): slots, lengths, uniforms."""
        page_size = self.config.page_size
        slots, positions = rows[0], rows[1] - 1
        decode = DecodeRows(rows[1].int(), self.tables[slots], longest)
        pages = decode.tables.gather(1, (positions // page_size)[:, None])[:, 0].long()
        places = pages * page_size + positions % page_size
        return torch.stack((self.last_tokens[slots], positions, places)), decode

    def host_decode_inputs(self, requests: list[Request], longest: int) -> tuple[Tensor, DecodeRows]:
        """The same made on the host, which on a CPU knows every token."""
        page_size, numbers = self.config.page_size, []
        for request in requests:
            position = request.num_computed - 1
            place = request.pages[position // page_size] * page_size + position % page_size
            numbers.append((request.output_ids[-1], position, place))
        tokens = torch.from_numpy(np.array(numbers, dtype=np.int64).T.copy())
        lens = tokens[1].int() + 1
        span = None if self.use_kernels else row_span([request.pages for request in requests], page_size)
        slots = torch.tensor([request.slot for request in requests])
        return tokens, DecodeRows(lens, self.tables[slots] if span is None else None, longest, span=span)

    def prompt_inputs(self, segments: list[Segment]) -> tuple[Tensor, PromptPieces]:
        """(3, M) token ids, positions and places of pieces of prompts, and what they attend to."""
        arrays = prompt_arrays(segments, self.config.page_size)
        inputs, offsets = self.upload(arrays.tokens), arrays.offsets.tolist()
        if not self.use_kernels:
            counts = np.diff(arrays.history_offsets).tolist()
            return inputs, PromptPieces(offsets, list(torch.from_numpy(arrays.history).split(counts)))
        from kernel.flash_attention_ranges import ranges_from_keys

        bounds = self.upload(arrays.bounds.astype(np.int32))  # (2, M)
        ranges = ranges_from_keys(bounds[:1], bounds[1:], len(arrays.history))
        return inputs, PromptPieces(offsets, [], self.upload(arrays.history), ranges)

    def sample(self, logits: Tensor, requests: list[Request], rows: Tensor) -> Sampled:
        """The next token of each row of logits (R, V), whose slots and uniforms are in `rows` (3, R)."""
        scores = logits[:, : self.config.num_ids]
        configs = [request.params.sampling for request in requests]
        if any(config.repetition_penalty != 1.0 for config in configs):
            seen = self.seen[rows[0]][:, : scores.shape[1]]
            scores = penalise_rows(scores.float(), seen, self.settings.penalty[rows[0]])
        if any(request.ngrams is not None for request in requests):
            banned = [request.ngrams.banned() if request.ngrams is not None else set() for request in requests]
            scores = ban_tokens(scores, banned)
        return self.choose(scores, rows, SamplingMode.of(configs))

    def choose(self, scores: Tensor, rows: Tensor, mode: SamplingMode) -> Sampled:
        """Draw from scores (R, V), and note the ids where the next step and the penalties look for them."""
        slots, uniforms = rows[0], rows[2].view(torch.float64)
        if self.use_kernels and len(scores):
            result = sample_rows_fused(scores, slots, uniforms, self, mode)
        else:
            settings = self.settings.rows(slots) if mode.draws else None
            result = sample_rows(scores.float(), settings, uniforms, mode)
            self.last_tokens[slots] = result.packed[:, 0].long()
        if self.seen is not None:
            self.seen[slots, result.packed[:, 0].long()] = True
        return result

    def fetch(self, results: list[Sampled], requests: list[Request], weight_version: int) -> Launch:
        """Start the copies for the host of what the requests have drawn, one result after the other."""
        most = max((request.params.top_log_probs for request in requests), default=0)
        packed = joined([result.packed for result in results])
        alternatives = None
        if most:
            alternatives = tuple(map(joined, zip(*(result.alternatives(most) for result in results), strict=True)))
        if self.device.type != "cuda":
            return Launch(requests, weight_version, packed, alternatives)
        packed = packed.to("cpu", non_blocking=True)
        if alternatives is not None:
            alternatives = tuple(tensor.to("cpu", non_blocking=True) for tensor in alternatives)
        done = torch.cuda.Event()
        done.record()
        return Launch(requests, weight_version, packed, alternatives, done)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def row_numbers(requests: list[Request]) -> np.ndarray:
    """(3, R) int64 of the rows that sample: slots, lengths so far, and the bits of the numbers to draw with."""
    rows = np.array([[r.slot for r in requests], [r.num_computed for r in requests], [0] * len(requests)], np.int64)
    rows[2].view(np.float64)[:] = [request.uniform_of(request.num_launched - 1) for request in requests]
    return rows


def compute_dtype(weight: Tensor) -> torch.dtype:
    """What projections give: the weights' dtype, or autocast's."""
    device_type = weight.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype


def position_tables(model: Transformer, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin of all positions, each (max_len, D/2) float32."""
    positions = torch.arange(max_len, device=model.output.weight.device)
    return tuple(table[0, :, 0, : table.shape[-1] // 2].contiguous() for table in model.rope(positions[None]))


def kernels_run(model: Transformer, device: torch.device) -> bool:
    """Whether the Triton attention kernels take this model on this device."""
    return device.type == "cuda" and model.config.head_dim in KERNEL_HEAD_DIMS


def row_span(rows: list[list[int]], page_size: int) -> tuple[int, int] | None:
    """DecodeRows.span of requests with these pages, or None."""
    if any(pages[-1] - pages[0] != len(pages) - 1 for pages in rows):
        return None  # quick, and enough for most
    if any(page != pages[0] + index for pages in rows for index, page in enumerate(pages)):
        return None
    firsts = [pages[0] for pages in rows]
    distance = firsts[1] - firsts[0] if len(firsts) > 1 else 0
    if any(firsts[i] + distance != firsts[i + 1] for i in range(len(firsts) - 1)) or distance < 0:
        return None
    return firsts[0] * page_size, distance * page_size


def sampling_rows(plan: StepPlan) -> list[int]:
    """The rows of a step's tokens whose states become scores."""
    rows, row = list(range(len(plan.decode))), len(plan.decode)
    for segment in plan.segments:
        row += len(segment.token_ids)
        if segment.samples:
            rows.append(row - 1)
    return rows
