"""The inference engine: requests in, tokens out, over a paged cache with continuous batching.

    engine = Engine(model, EngineConfig(num_ids=tokenizer.vocab_size), tokenizer)
    request_id = engine.submit(prompt_ids, RequestParams(max_new_tokens=100))
    while engine.has_work:
        for event in engine.step(): ...

One thread owns an engine. On a GPU a step's tokens are read while the next step runs, so the events of a step are those
of the step before. What the parts do: engine_scheduler (who runs), engine_pages (where), engine_runner (the device),
engine_cache (attention), engine_sampling (the next token).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from configs.errors import UserError
from llm.bpe_tokenizer import Tokenizer
from llm.engine_config import EngineConfig
from llm.engine_pages import PagePool
from llm.engine_request import Completion, EngineStats, RequestParams, TokenEvent
from llm.engine_runner import EngineRunner, Launch
from llm.engine_scheduler import Request, Scheduler
from llm.engine_text import RequestText
from llm.engine_weights import copy_weights
from llm.transformer import Transformer
from parallel.tensor_parallel import TensorLayout

__all__ = ["Completion", "Engine", "EngineConfig", "EngineStats", "RequestParams", "TokenEvent"]


class Engine:
    """Runs requests through one model; see the module's head. `tokenizer` is needed for text and stop strings.

    With `tensor_layout` (llm.parallelize_tensor.apply_tensor, sequence_parallel=False) the model is this rank's part.
    Every rank then makes the same calls: all plan the same steps and draw the same tokens.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        tensor_layout: TensorLayout | None = None,
    ):
        if tensor_layout is not None and tensor_layout.settings.sequence_parallel:
            raise UserError(
                "parallel.sequence_parallel=true cuts tokens over ranks, which decoding has too few of; set it to false"
            )
        self.tensor_layout = tensor_layout
        config = config.for_device(model.output.weight.device)
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.runner = EngineRunner(model, config, tensor_layout)
        self.pool = PagePool(self.runner.num_pages, config.prefix_sharing)
        self.scheduler = Scheduler(
            self.pool, config.page_size, config.max_running, config.prefill_chunk, self.runner.on_page
        )
        self.scheduler.columns = self.runner.tables.shape[1]
        if self.runner.invariant is not None:
            self.scheduler.step_tokens = self.runner.invariant.num_rows
        self.weight_version = 0
        self.requests: dict[int, Request] = {}
        self.pending: Launch | None = None  # launched, not read
        self.backlog: list[TokenEvent] = []  # to be returned by the next step
        self.next_id = 0
        self.counts = EngineStats(pages_total=self.runner.num_pages - 1)

    def submit(self, prompt_ids: list[int], params: RequestParams) -> int:
        """Queue a request and return its id; UserError where it can never run."""
        self.check(prompt_ids, params)
        return self.enqueue(prompt_ids, params)

    def enqueue(self, prompt_ids: list[int], params: RequestParams) -> int:
        """submit, once `check` has passed."""
        budget = min(params.max_new_tokens, self.runner.max_len - len(prompt_ids))
        request = Request(self.next_id, list(prompt_ids), params, budget, RequestText(self.tokenizer, params.stop))
        self.next_id += 1
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)
        self.counts.prompt_tokens += len(prompt_ids)
        return request.id

    def check(self, prompt_ids: list[int], params: RequestParams) -> None:
        """UserError for an empty prompt, ids that the model does not have, or more tokens than fit."""
        limit, num_ids = self.runner.max_len, self.config.num_ids or self.model.config.vocab_size
        if not prompt_ids:
            raise UserError("the prompt has no tokens; start it with the end-of-text token or give it text")
        if min(prompt_ids) < 0 or max(prompt_ids) >= num_ids:
            wrong = next(token_id for token_id in prompt_ids if not 0 <= token_id < num_ids)
            raise UserError(f"token id {wrong} of the prompt must lie in 0..{num_ids - 1}; use the model's tokenizer")
        if len(prompt_ids) >= limit:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens and max_seq_len={limit} leaves no room for a new one; "
                f"shorten it to {limit - 1} tokens or fewer"
            )
        most = min(len(prompt_ids) + params.max_new_tokens, limit)
        held = (self.runner.num_pages - 1) * self.config.page_size
        if most > held:
            raise UserError(
                f"prompt and completion may have {most} tokens and the cache holds {held}; raise num_pages or lower "
                f"max_new_tokens"
            )
        if params.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; give the engine one, or use stop_ids")

    def cancel(self, request_id: int) -> None:
        """Drop a request and give its pages back at once; no event of it follows. Unknown ids are done already."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.finish_reason = "cancelled"
            self.scheduler.remove(request)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return bool(self.requests or self.pending or self.backlog)

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Launch the next step and return the tokens that are read."""
        events, self.backlog = self.backlog, []
        if self.pending is not None and self.must_read_first():
            events += self.read(self.pending)
            self.pending = None
        plan = self.scheduler.plan()
        launch = None
        if plan.num_tokens:
            launch = self.runner.launch(plan, self.scheduler.admitted, self.weight_version)
            self.scheduler.admitted.clear()
            self.counts.steps += 1
            self.counts.computed_tokens += plan.num_tokens
        if self.pending is not None:
            events += self.read(self.pending)
        self.pending = launch
        if launch is not None and launch.done is None:  # a CPU has nothing to overlap
            events += self.read(launch)
            self.pending = None
        return events

    def must_read_first(self) -> bool:
        """Whether the next step depends on tokens that the host has not read: bans of n-grams are made there."""
        return any(request.ngrams is not None for request in self.scheduler.running)

    def read(self, launch: Launch) -> list[TokenEvent]:
        """The tokens of a launch, once the device is done with it; requests that end leave."""
        launch.wait()
        events = []
        rows = launch.packed.tolist()
        for row, (request, (token_id, log_prob, kept_mass)) in enumerate(zip(launch.requests, rows, strict=True)):
            if request.finish_reason is not None:
                continue  # it ended while this token was under way
            event = TokenEvent(request.id, int(token_id), log_prob, kept_mass, launch.weight_version)
            if request.params.top_log_probs:
                ids, values = (tensor[row, : request.params.top_log_probs].tolist() for tensor in launch.alternatives)
                event.alternatives = list(zip(ids, values, strict=True))
            self.take(request, event)
            events.append(event)
        self.counts.generated_tokens += len(events)
        return events

    def take(self, request: Request, event: TokenEvent) -> None:
        """Add a token to its request, and end the request where it ends."""
        request.output_ids.append(event.token_id)
        if request.ngrams is not None:
            request.ngrams.append(event.token_id)
        is_stop_id = event.token_id in request.params.stop_ids
        event.text = "" if is_stop_id else request.text.push(event.token_id)
        if is_stop_id or request.text.stopped:
            event.finish_reason = "stop"
        elif len(request.output_ids) >= request.budget:
            event.finish_reason = "length"
        if event.finish_reason is None:
            self.scheduler.publish(request)
            return
        event.text += request.text.finish()
        request.finish_reason = "stop" if request.text.stopped else event.finish_reason
        event.finish_reason = request.finish_reason
        self.scheduler.publish(request)
        self.scheduler.remove(request)
        del self.requests[request.id]

    def generate(self, prompts: list[list[int]], params: RequestParams | list[RequestParams]) -> list[Completion]:
        """Run prompts to their ends, each with its own params or all with the same; completions in order.

        With one RequestParams for all, prompt i draws with index params.index + i.
        """
        if isinstance(params, RequestParams):
            params = [replace(params, index=params.index + i) for i in range(len(prompts))]
        for prompt, own in zip(prompts, params, strict=True):
            self.check(prompt, own)
        ids = [self.enqueue(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        found = {request_id: Completion(list(prompt)) for request_id, prompt in zip(ids, prompts, strict=True)}
        others = []
        while any(request_id in self.requests for request_id in ids):
            for event in self.step():
                if event.request_id in found:
                    found[event.request_id].add(event)
                else:
                    others.append(event)
        self.backlog += others
        return [found[request_id] for request_id in ids]

    @torch.inference_mode()
    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in place, by the names of model.state_dict(); UserError, nothing changed, if they differ.

        What the cache holds is of the old weights: it is emptied, and running requests go on with the new ones from the
        tokens that they have; each token says which weights it came from.
        """
        copy_weights(self.model, tensors, self.tensor_layout)
        if self.pending is not None:
            self.backlog += self.read(self.pending)
            self.pending = None
        for request in reversed(list(self.scheduler.running)):
            self.scheduler.preempt(request)
        self.pool.forget()
        self.weight_version = version

    def forget_prefixes(self) -> None:
        """Empty what the cache keeps for later requests.

        Without requests slots and pages are given out from the first again, as by a new engine: which a request gets
        decides how its keys are read, and so the last bits of its log-probabilities.
        """
        self.pool.forget()
        if not self.requests:
            self.scheduler.free_slots.sort(reverse=True)
            self.pool.free = dict.fromkeys(sorted(self.pool.free, reverse=True))

    def stats(self) -> EngineStats:
        """The counters and what is held now."""
        return replace(
            self.counts,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_used=self.pool.num_used,
            pages_cached=len(self.pool.idle),
            shared_tokens=self.scheduler.shared_tokens,
            preemptions=self.scheduler.preemptions,
        )
