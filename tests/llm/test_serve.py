"""The server over HTTP with the real engine on a tiny model: answers against full recomputation, OpenAI's own client,
and everything a client can do wrong."""

import json
import math

import httpx
import openai
import pytest
import torch

from llm.bpe_tokenizer import Tokenizer
from llm.chat_prompt import plain_form
from llm.engine_config import EngineConfig
from llm.serve_config import ServeLimits
from llm.serve_guard import GuardRules
from llm.transformer_context import make_context
from tests.llm.serve_server import MODEL_NAME, RunningServer, ServerOptions, running_server
from tests.tolerances import FP32_FORWARD

PROMPT = "the cat sat"
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus) -> Tokenizer:
    return Tokenizer.load(tiny_corpus.tokenizer)


@pytest.fixture(scope="module")
def server(tokenizer):
    limits = ServeLimits(max_choices=16, max_body_bytes=20_000, max_waiting=64)
    with running_server(tokenizer, ServerOptions(limits=limits)) as running:
        yield running


@pytest.fixture
def http(server):
    with server.client() as client:
        yield client
    server.wait_until_idle()


@pytest.fixture
def openai_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client
    server.wait_until_idle()


def complete(http: httpx.Client, **body) -> dict:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(http: httpx.Client, path: str, **body) -> list[dict]:
    """The events of a stream, checked for its form; the closing [DONE] is cut off."""
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@torch.no_grad()
def greedy_reference(server: RunningServer, prompt_ids: list[int], num_tokens: int) -> list[tuple[int, torch.Tensor]]:
    """The definition: the whole row through the model for each token; ids with the log-probabilities (V,) they led."""
    ids, found = list(prompt_ids), []
    for _ in range(num_tokens):
        row = torch.tensor([ids])
        logits = server.model(row, make_context(row))[0, -1, : server.service.bounds.vocab_size]
        found.append((int(logits.argmax()), logits.log_softmax(-1)))
        ids.append(found[-1][0])
    return found


def test_a_completion_matches_full_recomputation(server, http, tokenizer):
    body = complete(http, **GREEDY, logprobs=3)
    reference = greedy_reference(server, [tokenizer.eot_id, *tokenizer.encode(PROMPT)], 12)
    choice = body["choices"][0]
    assert choice["text"] == tokenizer.decode([token_id for token_id, _ in reference])
    assert choice["finish_reason"] == "length" and body["model"] == MODEL_NAME
    assert body["usage"] == {"prompt_tokens": 1 + len(tokenizer.encode(PROMPT)), "completion_tokens": 12,
                             "total_tokens": 13 + len(tokenizer.encode(PROMPT))}  # fmt: skip
    for i, (token_id, log_probs) in enumerate(reference):
        assert choice["logprobs"]["token_logprobs"][i] == pytest.approx(float(log_probs[token_id]), abs=FP32_FORWARD)
        best = log_probs.topk(3).values.tolist()
        assert list(choice["logprobs"]["top_logprobs"][i].values()) == pytest.approx(best, abs=FP32_FORWARD)
    assert choice["logprobs"]["text_offset"][0] == 0


def test_a_stream_carries_what_the_whole_answer_holds(http):
    whole = complete(http, **GREEDY, logprobs=0)
    events = events_of(http, "/v1/completions", **GREEDY, logprobs=0, stream_options={"include_usage": True})
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for choice in choices for value in choice["logprobs"][name]]
        expected = whole["choices"][0]["logprobs"][name]
        assert joined == (pytest.approx(expected, abs=FP32_FORWARD) if name == "token_logprobs" else expected)
    assert [choice["finish_reason"] for choice in choices] == [None] * 11 + ["length"]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])


def test_prompts_given_as_token_ids_are_taken_as_they_are(http, tokenizer):
    ids = [tokenizer.eot_id, *tokenizer.encode(PROMPT)]
    assert (
        complete(http, **GREEDY | {"prompt": ids})["choices"][0]["text"]
        == complete(http, **GREEDY)["choices"][0]["text"]
    )


def test_choices_are_numbered_and_each_has_its_own_dice(http):
    settings = {"prompt": [PROMPT, "a dog"], "n": 3, "max_tokens": 8, "seed": -5}
    first, second = complete(http, **settings), complete(http, **settings)
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == list(range(6))
    assert texts == [choice["text"] for choice in second["choices"]], "equal seeds, equal answers"
    assert len(set(texts[:3])) == 3
    assert texts != [choice["text"] for choice in complete(http, **settings | {"seed": 6})["choices"]]
    assert first["usage"]["completion_tokens"] <= 48


def test_temperature_changes_the_reported_probabilities(server, http, tokenizer):
    """They are the model's at the temperature asked for, before top-k; so the whole distribution is known."""
    body = complete(http, prompt=PROMPT, temperature=0.5, top_k=1, max_tokens=1, logprobs=1)
    ((_, log_probs),) = greedy_reference(server, [tokenizer.eot_id, *tokenizer.encode(PROMPT)], 1)
    expected = float((log_probs / 0.5).log_softmax(-1).max())
    assert body["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(expected, abs=FP32_FORWARD)


def test_a_stop_string_ends_the_text_before_it(http):
    text = complete(http, **GREEDY | {"max_tokens": 40})["choices"][0]["text"]
    stop = text[10:13]
    choice = complete(http, **GREEDY | {"max_tokens": 40}, stop=[stop])["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    streamed = events_of(http, "/v1/completions", **GREEDY | {"max_tokens": 40}, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]


def test_max_tokens_is_cut_to_what_the_context_leaves(server, http):
    body = complete(http, prompt=PROMPT, max_tokens=10**9, temperature=0)
    assert body["usage"]["total_tokens"] == server.service.bounds.max_seq_len


def test_a_cache_smaller_than_the_context_bounds_requests(tokenizer):
    """A chat without max_tokens may run as far as the whole cache goes, instead of being refused."""
    engine = EngineConfig(page_size=16, num_pages=3, max_running=2)
    with running_server(tokenizer, ServerOptions(max_seq_len=128, engine=engine)) as server, server.client() as http:
        body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
        assert http.post("/v1/chat/completions", json=body).json()["usage"]["total_tokens"] == 48
        check_error(http.post("/v1/completions", json={"prompt": [1] * 48}), 400, "at most 47 fit")


def test_a_chat_without_a_template_is_the_plain_form(http, tokenizer, server):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    body = http.post("/v1/chat/completions", json={
        "messages": messages, "temperature": 0, "max_tokens": 9, "logprobs": True, "top_logprobs": 2,
    }).json()  # fmt: skip
    plain = plain_form([messages[0], {"role": "user", "content": "Hi"}])
    assert plain == "Be short.\n\nUser: Hi\n\nAssistant:"
    reference = greedy_reference(server, [tokenizer.eot_id, *tokenizer.encode(plain)], 9)
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == tokenizer.decode([token_id for token_id, _ in reference])
    entries = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == [tokenizer.token_bytes(i) for i, _ in reference]
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries), "greedy takes the likeliest"


def test_openai_client_completes_and_lists_models(openai_client):
    assert [model.id for model in openai_client.models.list()] == [MODEL_NAME]
    assert openai_client.models.retrieve(MODEL_NAME).owned_by == "mew"
    answer = openai_client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2)
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens == 5
    assert len(answer.choices[0].logprobs.top_logprobs[0]) == 2


def test_openai_client_streams_a_chat(openai_client):
    settings = dict(
        model=MODEL_NAME, messages=[{"role": "user", "content": "Hi"}], temperature=0, max_completion_tokens=7
    )
    whole = openai_client.chat.completions.create(**settings, logprobs=True, top_logprobs=3)
    stream = openai_client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert content == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 7
    assert math.isclose(
        whole.choices[0].logprobs.content[0].logprob, whole.choices[0].logprobs.content[0].top_logprobs[0].logprob
    )


def test_openai_client_continues_a_conversation_with_our_own_message(openai_client):
    messages = [{"role": "user", "content": "Hi"}]
    first = openai_client.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=4, seed=1)
    messages += [first.choices[0].message, {"role": "user", "content": "More"}]
    second = openai_client.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=4, seed=1)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_openai_client_names_our_errors(openai_client):
    with pytest.raises(openai.BadRequestError, match="shorten it"):
        openai_client.completions.create(model=MODEL_NAME, prompt="word " * 200)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        openai_client.completions.create(model="gpt-9", prompt="x")


BAD_BODIES = {
    "malformed": (b'{"prompt": "a"', 400, "not JSON"),
    "not an object": (b"[1, 2]", 400, "object"),
    "empty body": (b"", 400, "not JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, "not JSON"),
    "half a surrogate": (rb'{"prompt": "\ud800"}', 400, "not JSON"),
    "deeply nested": (b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400, "not JSON"),
    "no prompt": (b"{}", 400, "prompt"),
    "empty prompt": (b'{"prompt": ""}', 400, "empty"),
    "one empty of two": (b'{"prompt": ["a", ""]}', 400, "empty"),
    "no prompts": (b'{"prompt": []}', 400, "not empty"),
    "empty ids": (b'{"prompt": [[1], []]}', 400, "not empty"),
    "mixed prompts": (b'{"prompt": ["a", [1]]}', 400, "all texts or all lists"),
    "unknown id": (b'{"prompt": [1, 5000]}', 400, "outside 0..319"),
    "padding id": (b'{"prompt": [320]}', 400, "outside 0..319"),
    "negative id": (b'{"prompt": [-1]}', 400, "outside"),
    "huge id": (b'{"prompt": [' + b"9" * 400 + b"]}", 400, "outside 0..319"),
    "endless id": (b'{"prompt": [' + b"9" * 9000 + b"]}", 400, ""),
    "id true": (b'{"prompt": [true]}', 400, "whole numbers"),
    "over the window": (json.dumps({"prompt": [1] * 64}).encode(), 400, "at most 63 fit"),
    "max_tokens 0": (b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
    "max_tokens text": (b'{"prompt": "a", "max_tokens": "5"}', 400, "max_tokens"),
    "n 0": (b'{"prompt": "a", "n": 0}', 400, "n:"),
    "huge n": (b'{"prompt": "a", "n": 1000000000}', 400, "limit of 16"),
    "n times prompts": (b'{"prompt": ["a", "b", "c"], "n": 6}', 400, "limit of 16"),
    "temperature NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    "temperature high": (b'{"prompt": "a", "temperature": 3}', 400, "temperature"),
    "top_p 0": (b'{"prompt": "a", "top_p": 0}', 400, "top_p"),
    "logprobs 21": (b'{"prompt": "a", "logprobs": 21}', 400, "logprobs"),
    "empty stop": (b'{"prompt": "a", "stop": [""]}', 400, "stop"),
    "17 stops": (json.dumps({"prompt": "a", "stop": ["x"] * 17}).encode(), 400, "at most 16"),
    "unknown argument": (b'{"prompt": "a", "temprature": 1}', 400, "unrecognised argument temprature"),
    "not served": (b'{"prompt": "a", "logit_bias": {"1": 5}}', 400, "logit_bias"),
    "penalty": (b'{"prompt": "a", "frequency_penalty": 0.5}', 400, "frequency_penalty"),
    "usage of no stream": (b'{"stream": false, "prompt": "a", "stream_options": {}}', 400, "stream=true"),
    "other model": (b'{"prompt": "a", "model": "gpt-9"}', 404, "not served here"),
    "too large": (b'{"prompt": "' + b"a" * 20_000 + b'"}', 413, "over 20,000 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_completions_are_refused_with_a_reason(http, name, stream):
    content, status, reason = BAD_BODIES[name]
    if stream:
        content = content.replace(b'{"prompt"', b'{"stream": true, "prompt"', 1)
    check_error(
        http.post("/v1/completions", content=content, headers={"content-type": "application/json"}), status, reason
    )


SAID = {"messages": [{"role": "user", "content": "a"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BAD_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "all empty": ({"messages": [{"role": "user", "content": " "}]}, "empty"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
    "no content": ({"messages": [{"role": "user"}]}, "content"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
    "tools": (SAID | {"tools": [{"type": "function"}]}, "tools"),
    "top_logprobs alone": (SAID | {"top_logprobs": 2}, "logprobs=true"),
    "two maxima": (SAID | {"max_tokens": 1, "max_completion_tokens": 1}, "one of them"),
    "json mode": (SAID | {"response_format": {"type": "json_object"}}, "response_format"),
    "over the window": ({"messages": [{"role": "user", "content": "word " * 100}]}, "shorten it"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_chats_are_refused_with_a_reason(http, name):
    body, reason = BAD_CHATS[name]
    check_error(http.post("/v1/chat/completions", json=body), 400, reason)


def check_error(response: httpx.Response, status: int, reason: str) -> None:
    """An error in OpenAI's shape, in one line, with the status and the words expected."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert reason in error["message"] and "\n" not in error["message"] and len(error["message"]) < 400


def test_paths_methods_and_media_types(http):
    check_error(http.get("/v1/nothing"), 404, "no such path")
    check_error(http.get("/v1/completions"), 405, "another method")
    check_error(http.post("/v1/completions", content=b'{"prompt": "a"}'), 415, "Content-Type")
    check_error(http.get("/v1/models/gpt-9"), 404, "not served here")
    assert http.get("/static/../serve.py").status_code == 404
    assert http.get("/static/%2e%2e/serve.py").status_code == 404


def test_a_body_without_a_length_is_bounded_too(http):
    pieces = (b'{"prompt": "' + b"a" * 5_000 for _ in range(10))
    check_error(http.post("/v1/completions", content=pieces, headers={"content-type": "application/json"}), 413, "over")


def test_browsers_of_other_sites_are_kept_out(server, http):
    check_error(http.get("/v1/models", headers={"host": "rebound.example"}), 403, "not a name of this server")
    check_error(http.get("/v1/models", headers={"origin": "https://evil.example"}), 403, "another site")
    check_error(http.get("/v1/models", headers={"origin": "null"}), 403, "another site")
    assert http.get("/v1/models", headers={"origin": server.url}).status_code == 200
    policy = http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_metrics_count_requests_tokens_and_times(server, http):
    def read() -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        }

    before = read()
    complete(http, **GREEDY)
    http.post("/v1/completions", json={"prompt": ""})
    events_of(http, "/v1/completions", **GREEDY)
    after = read()
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained['mew_requests_total{path="/v1/completions",status="200"}'] == 2
    assert gained['mew_requests_total{path="/v1/completions",status="400"}'] == 1
    assert gained["mew_completion_tokens_total"] == 24
    assert gained["mew_time_to_first_token_seconds_count"] == gained["mew_request_seconds_count"] == 2
    assert gained["mew_time_per_token_seconds_count"] == gained['mew_time_per_token_seconds_bucket{le="+Inf"}'] == 22
    assert after["mew_pages"] == server.worker.stats.pages_total and after["mew_resident_memory_bytes"] > 0


def test_a_token_is_asked_for_where_one_is_set(tokenizer):
    rules = GuardRules(token="correct-horse-battery")
    engine = EngineConfig(page_size=16, max_running=2)
    with running_server(tokenizer, ServerOptions(rules=rules, engine=engine)) as server, server.client() as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic correct-horse-battery"}):
            response = http.get("/v1/models", headers=headers)
            check_error(response, 401, "Authorization: Bearer")
            assert response.headers["www-authenticate"] == "Bearer"
        assert http.get("/metrics").status_code == 401
        assert http.get("/health").status_code == http.get("/").status_code == 200
        assert http.get("/v1/models", headers={"authorization": "Bearer correct-horse-battery"}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
