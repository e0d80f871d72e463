"""Which requests run in the next step, and on which pages: continuous batching with chunked prefill and preemption.

Every running request whose prompt is in the cache gets one token a step; beside them the prompts of the others advance
by at most `prefill_chunk` tokens in all, the oldest first. A request takes the pages of its whole prompt when it is
let in; when a running one needs a page and none is left, the youngest is put back and computed again later (Kwon et
al. 2023, vLLM). What differs: pages are published when their computation is planned, not when it is done, since a
layer writes all keys of a step before any query of that step reads; so requests with one prompt that come together
compute it once.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from llm.engine_pages import ROOT, PagePool, page_key
from llm.engine_request import RequestParams
from llm.engine_text import RequestText
from llm.sampling import NgramIndex, row_generator

DRAWN_AT_ONCE = 64  # uniform numbers of a request's dice


@dataclass(eq=False)
class Request:
    """One request and where it stands; `num_launched` tokens were sampled on the device, `output_ids` of them read.

    num_computed: tokens whose keys and values the launches so far write. budget: tokens that it may get in all.
    """

    id: int
    prompt_ids: list[int]
    params: RequestParams
    budget: int
    text: RequestText
    output_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0  # of its pages, those that others can find
    num_launched: int = 0
    slot: int = -1
    prefilling: bool = True
    finish_reason: str | None = None
    ngrams: NgramIndex | None = None
    uniforms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        sampling = self.params.sampling
        self.generator = row_generator(sampling.seed, self.params.index) if sampling.temperature > 0 else None
        if sampling.no_repeat_ngram:
            self.ngrams = NgramIndex(sampling.no_repeat_ngram, self.prompt_ids)

    @property
    def is_exhausted(self) -> bool:
        """Whether the launches so far sample its last token."""
        return self.num_launched >= self.budget

    @property
    def is_read(self) -> bool:
        """Whether the host knows all its tokens."""
        return self.num_launched == len(self.output_ids)

    def known_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def uniform_of(self, index: int) -> float:
        """The number that token `index` of the output is drawn with, however often it is computed."""
        if self.generator is None:
            return 0.0
        while len(self.uniforms) <= index:
            more = torch.rand(DRAWN_AT_ONCE, dtype=torch.float64, generator=self.generator)
            self.uniforms.extend(more.tolist())
        return self.uniforms[index]

    def update_page_keys(self, page_size: int) -> None:
        """The keys of all full pages of the tokens that are known."""
        known = len(self.prompt_ids) + len(self.output_ids)
        if known // page_size == len(self.page_keys):
            return
        ids = self.known_ids()
        for page in range(len(self.page_keys), known // page_size):
            parent = self.page_keys[-1] if self.page_keys else ROOT
            self.page_keys.append(page_key(parent, ids[page * page_size : (page + 1) * page_size]))


@dataclass
class Segment:
    """The next `token_ids` of a prompt, from position `start`; `samples`: the last of them, so a token follows."""

    request: Request
    start: int
    token_ids: list[int]
    samples: bool


@dataclass
class StepPlan:
    """One step: a token each for `decode`, and pieces of prompts."""

    decode: list[Request] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(len(segment.token_ids) for segment in self.segments)

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the order of the rows."""
        return self.decode + [segment.request for segment in self.segments if segment.samples]


class Scheduler:
    """The queue, the running requests, their slots (rows of the device's tables) and pages."""

    def __init__(
        self, pool: PagePool, page_size: int, max_running: int, prefill_chunk: int, on_page: Callable[..., None]
    ):
        """on_page(slot, column, page) tells the device's tables of a page."""
        self.step_tokens: int | None = None  # of a step in all, where steps have one shape
        self.pool, self.page_size, self.prefill_chunk = pool, page_size, prefill_chunk
        self.on_page = on_page
        self.columns = 0  # pages of a slot of full length; the engine sets it
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they were let in
        self.free_slots = list(range(max_running - 1, -1, -1))
        self.admitted: list[Request] = []  # since the last plan was launched: their slots' settings must be sent
        self.shared_tokens = 0
        self.preemptions = 0

    def plan(self) -> StepPlan:
        """Decide the next step and count it as computed."""
        plan, preempted = StepPlan(), self.preemptions
        for request in list(self.running):
            if request.slot < 0 or request.prefilling or request.is_exhausted:
                continue
            if self.grow(request):
                plan.decode.append(request)
        room = self.prefill_chunk if self.step_tokens is None else self.step_tokens - len(plan.decode)
        for request in self.running:
            if request.prefilling and room > 0:
                room -= self.add_segment(plan, request, room)
        while self.waiting and room > 0 and self.preemptions == preempted and self.admit(self.waiting[0]):
            request = self.waiting.popleft()
            room -= self.add_segment(plan, request, room)
        for request in plan.decode:
            request.num_computed += 1
        for request in plan.sampled:
            request.num_launched += 1
        return plan

    def add_segment(self, plan: StepPlan, request: Request, room: int) -> int:
        """Plan the next piece of a prompt, at most `room` tokens, and publish the pages that it fills."""
        ids = request.known_ids()
        start = request.num_computed
        end = min(len(ids), start + room)
        request.num_computed = end
        request.prefilling = end < len(ids)
        plan.segments.append(Segment(request, start, ids[start:end], samples=not request.prefilling))
        self.publish(request)
        return end - start

    def publish(self, request: Request) -> None:
        """Let others find the request's full pages, as far as their tokens are known and planned."""
        known = min(request.num_computed, len(request.prompt_ids) + len(request.output_ids))
        first, full = request.num_published, known // self.page_size
        if full <= first or not self.pool.sharing or request.slot < 0:
            return
        request.update_page_keys(self.page_size)
        for page, key in zip(request.pages[first:full], request.page_keys[first:full], strict=True):
            self.pool.publish(page, key)
        request.num_published = full

    def grow(self, request: Request) -> bool:
        """Make room for one more token, putting younger requests back if need be; False if this one was put back."""
        if request.num_computed < len(request.pages) * self.page_size:
            return True
        while not self.pool.num_available:
            victims = [other for other in self.running if not other.is_exhausted]
            self.preempt(victims[-1])
            if victims[-1] is request:
                return False
        self.give_page(request, self.pool.take(self.home(request)))
        return True

    def admit(self, request: Request) -> bool:
        """Give a waiting request a slot and the pages of all its known tokens, if there are enough."""
        if not self.free_slots or not request.is_read:
            return False
        ids = request.known_ids()
        shared = self.find_shared(request, len(ids))
        needed = -(-len(ids) // self.page_size) - len(shared)
        idle_shared = sum(page in self.pool.idle for page in shared)
        if self.pool.num_available - idle_shared < needed:
            return False
        request.slot = self.free_slots.pop()
        for page in shared:
            self.pool.share(page)
            self.give_page(request, page)
        for _ in range(needed):
            self.give_page(request, self.pool.take(self.home(request)))
        request.num_computed = len(shared) * self.page_size
        request.num_published = len(shared)
        request.prefilling = True
        self.shared_tokens += request.num_computed
        self.running.append(request)
        self.admitted.append(request)
        return True

    def find_shared(self, request: Request, num_tokens: int) -> list[int]:
        """Pages that hold the request's beginning; its last token is always computed, for its logits."""
        if not self.pool.sharing:
            return []
        request.update_page_keys(self.page_size)
        pages = []
        for key in request.page_keys[: (num_tokens - 1) // self.page_size]:
            page = self.pool.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def home(self, request: Request) -> int:
        """The page that would keep every slot's pages in order, slot after slot, where all of them fit."""
        page = 1 + request.slot * self.columns + len(request.pages)
        return page if page < self.pool.num_pages else 0

    def give_page(self, request: Request, page: int) -> None:
        self.on_page(request.slot, len(request.pages), page)
        request.pages.append(page)

    def preempt(self, request: Request) -> None:
        """Back to the head of the queue without pages; its tokens so far will be computed like a prompt."""
        self.leave(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def leave(self, request: Request) -> None:
        """Give slot and pages back."""
        if request.slot < 0:
            return
        self.pool.release(reversed(request.pages))
        request.pages = []
        request.num_computed = request.num_published = 0
        request.prefilling = True
        self.free_slots.append(request.slot)
        request.slot = -1
        self.running.remove(request)
        if request in self.admitted:
            self.admitted.remove(request)

    def remove(self, request: Request) -> None:
        """The request is done, wherever it stands."""
        if request.slot >= 0:
            self.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
