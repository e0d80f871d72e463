"""The page in headless Chromium: streaming, stopping, the confidence view, and text that would like to be markup."""

import json
import math
import shutil

import pytest

from llm.bpe_tokenizer import Tokenizer
from llm.engine_config import EngineConfig
from llm.serve_guard import GuardRules
from tests.llm.serve_server import MODEL_NAME, GatedEngine, ServerOptions, running_server

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
LONG = 4096  # a context that takes the tiny model many seconds to fill
PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus) -> Tokenizer:
    return Tokenizer.load(tiny_corpus.tokenizer)


@pytest.fixture(scope="module")
def server(tokenizer):
    options = ServerOptions(max_seq_len=LONG, engine=EngineConfig(page_size=16, num_pages=600, max_running=4))
    with running_server(tokenizer, options) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser):
    """A function that opens a server's page; at the end no page may have logged an error."""
    contexts, errors = [], []

    def opened(server, **settings):
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(server.url)
        return page

    yield opened
    for context in contexts:
        context.close()
    # A refused request is logged by Chromium itself; the page's handling of it is tested.
    assert [error for error in errors if "the server responded with a status" not in error] == []


def ready(page) -> None:
    playwright.expect(page.locator("#model")).to_contain_text(MODEL_NAME)


def ask(page, text: str, **settings: float) -> None:
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    page.fill("#input", text)
    page.press("#input", "Enter")


def finished(page, count: int = 1) -> None:
    playwright.expect(page.locator(".foot").nth(count - 1)).to_contain_text("tokens", timeout=30_000)


def test_continuing_shows_the_text_and_each_tokens_alternatives(server, open_page):
    page = open_page(server)
    ready(page)
    ask(page, PROMPT, max_tokens=12, top_k=0, seed=5)
    finished(page)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 5, "logprobs": 8}
    with server.client() as http:
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert page.locator(".prompt").text_content() == PROMPT
    spans = page.locator(".token:not(.end)")
    assert len("".join(spans.all_text_contents())) == len(choice["text"])
    place = next(i for i, name in enumerate(choice["logprobs"]["tokens"]) if len(name) == 1 and name.isalnum())
    name, log_prob = choice["logprobs"]["tokens"][place], choice["logprobs"]["token_logprobs"][place]
    span = spans.filter(has_text=name).first
    assert float(span.evaluate("span => span.style.getPropertyValue('--p')")) == pytest.approx(
        math.exp(log_prob), abs=1e-4
    )
    span.hover()
    rows = page.locator(".tip .row")
    assert rows.count() in (8, 9), "the eight likeliest, and the token itself where it is not among them"
    shares = [math.exp(value) for value in choice["logprobs"]["top_logprobs"][place].values()]
    best = float(page.locator(".tip .share").first.text_content().rstrip("%"))
    assert best == pytest.approx(100 * max(shares), abs=0.5), "best first, in rounded percent"
    assert page.locator(".tip .row.chosen .name").text_content() == name
    page.locator("h1").hover()
    playwright.expect(page.locator(".tip")).to_be_hidden()


def test_the_keyboard_walks_through_the_tokens(server, open_page):
    page = open_page(server)
    ready(page)
    ask(page, PROMPT, max_tokens=6, seed=1)
    finished(page)
    page.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token").nth(1).evaluate("span => span.classList.contains('picked')")
    playwright.expect(page.locator(".tip")).to_be_visible()
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".tip")).to_be_hidden()


def test_going_on_sends_the_text_so_far(server, open_page):
    page = open_page(server)
    ready(page)
    sent = []
    page.on("request", lambda request: sent.append(request.post_data) if request.method == "POST" else None)
    ask(page, PROMPT, max_tokens=5, seed=1)
    finished(page)
    page.get_by_role("button", name="Go on").click()
    playwright.expect(page.locator(".foot")).to_contain_text("tokens")
    assert page.locator(".turn").count() == 1
    prompts = [json.loads(body)["prompt"] for body in sent]
    assert prompts[0] == PROMPT and prompts[1].startswith(PROMPT) and len(prompts[1]) > len(PROMPT)


def test_stop_ends_the_answer_and_frees_the_engine(tokenizer, open_page):
    """The engine holds the fifth token back: however slow the browser is, there is something to stop."""
    engine = GatedEngine()
    engine.max_prompt_tokens = LONG
    with running_server(tokenizer, ServerOptions(max_seq_len=LONG), engine) as server:
        page = open_page(server)
        ready(page)
        engine.permits.release(4)
        ask(page, PROMPT, max_tokens=LONG)
        playwright.expect(page.locator(".token").nth(3)).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        playwright.expect(page.locator(".foot")).to_contain_text("stopped by you")
        server.wait_until_idle()
        assert len(engine.cancelled) == 1 and not engine.running
        playwright.expect(page.locator("#send")).to_be_enabled()


def test_leaving_the_page_frees_the_engine(server, open_page):
    page = open_page(server)
    ready(page)
    ask(page, PROMPT, max_tokens=LONG)
    playwright.expect(page.locator(".token").first).to_be_visible()
    page.close()
    server.wait_until_idle()


def test_a_chat_sends_its_history(server, open_page):
    page = open_page(server)
    ready(page)
    sent = []
    page.on("request", lambda request: sent.append(request.post_data) if request.method == "POST" else None)
    page.locator(".modes").get_by_text("Chat").click()
    page.fill("#system", "Be short.")
    ask(page, "Hi", max_tokens=4, seed=1)
    finished(page)
    ask(page, "More")
    finished(page, 2)
    first, second = (json.loads(body)["messages"] for body in sent)
    assert [message["role"] for message in first] == ["system", "user"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    page.get_by_role("button", name="New").click()
    assert page.locator(".turn").count() == 0


def test_text_that_looks_like_markup_stays_text(tokenizer, open_page):
    """From the user and from the model; the policy would also refuse to run it."""
    attack = '<img src=x onerror="document.title=1"><script>document.title=1</script>\u202e'
    engine = GatedEngine()
    engine.text, engine.max_prompt_tokens = attack, LONG
    with running_server(tokenizer, ServerOptions(max_seq_len=LONG), engine) as server:
        page = open_page(server)
        ready(page)
        page.locator(".modes").get_by_text("Chat").click()
        engine.permits.release(2)
        ask(page, attack)
        playwright.expect(page.locator(".token")).to_have_count(2)
        page.get_by_role("button", name="Stop").click()
        shown = attack.replace("\u202e", "\ufffd")
        assert page.locator(".token").all_text_contents() == [shown, shown]
        assert page.locator(".turn.user").text_content() == shown
        assert page.locator("main img, main script").count() == 0 and page.title() == "mew"


def test_errors_are_shown_in_the_servers_words(server, open_page):
    page = open_page(server)
    ready(page)
    ask(page, "word " * LONG)
    playwright.expect(page.locator("#alert")).to_contain_text("shorten it", timeout=20_000)


def test_a_token_is_asked_for_and_used(tokenizer, open_page):
    options = ServerOptions(rules=GuardRules(token="correct-horse-battery"))
    with running_server(tokenizer, options) as server:
        page = open_page(server)
        playwright.expect(page.locator("#alert")).to_contain_text("wrong token")
        page.fill("#token", "correct-horse-battery")
        page.press("#token", "Tab")
        ready(page)
        ask(page, PROMPT, max_tokens=3)
        finished(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_sees_all_of_it_without_scrolling_sideways(server, open_page, scheme):
    page = open_page(server, viewport={"width": 360, "height": 640}, color_scheme=scheme)
    ready(page)
    page.locator("summary").click()
    ask(page, "word" * 40, max_tokens=24)
    finished(page)
    page.locator(".token").last.click()
    width, shown = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    tip = page.locator(".tip").bounding_box()
    assert width <= shown and tip["x"] >= 0 and tip["x"] + tip["width"] <= shown
