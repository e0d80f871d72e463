"""Pages, stop strings and the scheduler under disorder: nothing leaks, and every request that ends is right."""

import random

import pytest
import torch

from llm.engine import Engine, EngineConfig, RequestParams
from llm.engine_pages import ROOT, PagePool, page_key
from llm.engine_text import StopStrings
from llm.sampling import SamplingConfig
from tests.llm.test_engine import GREEDY, greedy_without_cache, random_model


def test_pages_are_counted_found_again_and_taken_from_the_longest_unused():
    pool = PagePool(5)
    keys = [page_key(ROOT, [1, 2])]
    keys.append(page_key(keys[0], [3, 4]))
    assert keys[1] != page_key(ROOT, [3, 4]), "a page's key holds what stands before it"
    pages = [pool.take() for _ in range(3)]
    assert 0 not in pages and pool.num_used == 3
    for page, key in zip(pages[:2], keys, strict=True):
        pool.publish(page, key)
    pool.share(pool.find(keys[0]))
    pool.release(reversed(pages))
    assert pool.num_used == 1 and pool.find(keys[1]) == pages[1], "one has a user yet, one is kept for sharing"
    pool.release([pages[0]])
    assert pool.num_used == 0 and pool.num_available == 4
    taken = {pool.take() for _ in range(3)}  # two free ones, then the one unused for longest
    assert pages[1] in taken and pool.find(keys[1]) is None and pool.find(keys[0]) == pages[0]
    pool.forget()
    assert pool.find(keys[0]) is None and pool.num_available == 1
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([pages[0]])


def test_a_wanted_page_is_given_if_it_is_free():
    pool = PagePool(6)
    assert [pool.take(4), pool.take(4), pool.take()] == [4, 1, 2]


@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_show_what_stands_before_the_first_however_the_text_is_cut(seed):
    draw = random.Random(seed)
    for _ in range(200):
        text = "".join(draw.choices("ab", k=30))
        stop = tuple("".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(draw.randint(0, 3)))
        stops, shown, at = StopStrings(stop), "", 0
        while at < len(text) and not stops.found:
            step = draw.randint(1, 4)
            shown += stops.push(text[at : at + step])
            at += step
        shown += "" if stops.found else stops.finish()
        ends = [index for index in (text.find(one) for one in stop) if index >= 0]
        # A longer string that begins earlier may be whole only after a shorter one inside it: the shorter one ends it.
        if not ends:
            assert shown == text and not stops.found
        else:
            assert stops.found and text.startswith(shown) and not any(one in shown for one in stop)
            assert min(ends) <= len(shown) <= max(ends)


@pytest.mark.parametrize("seed", range(3))
def test_disorder_leaves_no_page_behind_and_changes_no_answer(seed):
    """Requests that come, share beginnings, are preempted, cancelled and end at random."""
    draw, model = random.Random(seed), random_model()
    config = EngineConfig(page_size=4, num_pages=14, max_running=5, prefill_chunk=6)
    engine = Engine(model, config)
    beginnings = [[draw.randrange(96) for _ in range(12)] for _ in range(2)]
    prompts, params, found = {}, {}, {}
    for _ in range(120):
        if draw.random() < 0.3 and len(prompts) < 25:
            ending = [draw.randrange(96) for _ in range(draw.randint(0, 6))]
            prompt = draw.choice(beginnings)[: draw.randint(1, 12)] + ending
            own = RequestParams(GREEDY, max_new_tokens=draw.randint(1, 20))
            request_id = engine.submit(prompt, own)
            prompts[request_id], params[request_id], found[request_id] = prompt, own, []
        if draw.random() < 0.05 and engine.requests:
            engine.cancel(draw.choice(list(engine.requests)))
        for event in engine.step():
            found[event.request_id].append(event)
        users = sum(engine.pool.references)
        held = sum(len(request.pages) for request in engine.scheduler.running)
        assert users == held and engine.pool.num_used <= 14
    while engine.has_work:
        for event in engine.step():
            found[event.request_id].append(event)
    done = [request_id for request_id in prompts if found[request_id] and found[request_id][-1].finish_reason]
    assert len(done) > 10 and engine.stats().preemptions > 0 and engine.stats().shared_tokens > 0
    for request_id in done:
        expected = greedy_without_cache(model, prompts[request_id], params[request_id].max_new_tokens)
        assert [event.token_id for event in found[request_id]] == expected
    assert engine.pool.num_used == 0 and sum(engine.pool.references) == 0
    assert sorted(engine.scheduler.free_slots) == list(range(5)) and not engine.requests


def test_draws_are_the_same_after_a_preemption():
    model = random_model()
    settings = SamplingConfig(temperature=1.1, seed=5)
    prompts = [[3 * i + 1, 7, 9] for i in range(5)]
    found = []
    for pages in (64, 14):
        engine = Engine(model, EngineConfig(page_size=4, num_pages=pages, max_running=5, prefill_chunk=6))
        found.append([c.token_ids for c in engine.generate(prompts, RequestParams(settings, max_new_tokens=24))])
        assert (engine.stats().preemptions > 0) == (pages == 14)
    assert found[0] == found[1] and len({tuple(row) for row in found[0]}) == 5
    assert torch.tensor(found[0]).shape == (5, 24)
