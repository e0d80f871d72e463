"""The terminal chat: its commands, its history, and Ctrl-C in the middle of an answer."""

import io
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from configs.errors import UserError
from configs.report_samples import printable
from llm.bpe_tokenizer import Tokenizer
from llm.chat import Chat, confidence_style, interrupts
from llm.chat_prompt import ChatPrompt
from llm.chat_session import ChatSession
from llm.engine import Engine
from llm.engine_config import EngineConfig
from llm.engine_request import RequestParams
from llm.sampling import SamplingConfig
from tests.llm.serve_server import random_model

MAX_SEQ_LEN = 96


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus) -> Tokenizer:
    return Tokenizer.load(tiny_corpus.tokenizer)


@pytest.fixture
def chat(tokenizer) -> Chat:
    config = EngineConfig(page_size=16, max_running=1, num_ids=tokenizer.vocab_size)
    engine = Engine(random_model(tokenizer, MAX_SEQ_LEN), config, tokenizer)
    session = ChatSession(SamplingConfig(temperature=0.0), max_new_tokens=8)
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    made = Chat(engine, ChatPrompt(tokenizer), session, console)
    yield made
    assert not engine.has_work and engine.stats().pages_used == 0


def shown(chat: Chat) -> str:
    return chat.console.file.getvalue()


def test_an_answer_is_shown_and_kept(chat):
    chat.handle("Hi")
    question, answer = chat.session.turns
    assert question == {"role": "user", "content": "Hi"} and answer["role"] == "assistant"
    ids = chat.prompt.encode_chat([question])
    (expected,) = chat.engine.generate([ids], RequestParams(SamplingConfig(temperature=0.0), 8, chat.prompt.stop_ids))
    assert answer["content"] == expected.text
    assert expected.finish_reason != "length" or "(length limit)" in shown(chat)


def test_a_text_is_continued_without_a_form(chat):
    chat.handle("/mode continue")
    chat.handle("the cat")
    ids = chat.prompt.encode_text("the cat")
    (expected,) = chat.engine.generate([ids], RequestParams(SamplingConfig(temperature=0.0), 8, chat.prompt.stop_ids))
    assert chat.session.turns == [] and printable(expected.text) in shown(chat)


def test_equal_questions_do_not_draw_equal_answers(chat):
    chat.session.sampling = SamplingConfig(temperature=2.0)
    chat.handle("/mode continue")
    answers = [chat.respond([1, 2, 3], ()) for _ in range(2)]
    assert answers[0] != answers[1]


def test_interrupting_ends_the_answer_and_keeps_what_came(chat, monkeypatch):
    """SIGINT comes inside a step of the engine, which runs to its end."""
    step, steps, before = chat.engine.step, [], signal.getsignal(signal.SIGINT)  # ignored in a shell's background job

    def interrupted_step():
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(chat.engine, "step", interrupted_step)
    chat.session.max_new_tokens = 50
    chat.handle("Hi")
    assert len(steps) in (3, 4) and "(stopped)" in shown(chat)
    assert signal.getsignal(signal.SIGINT) is before
    chat.handle("More")  # the session goes on


def test_interrupts_gives_the_old_handler_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), interrupts():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(chat):
    for number in range(12):
        chat.handle(f"number {number}")
    assert "no longer fit" in shown(chat)
    ids = chat.prompt.encode_chat(chat.session.messages())
    assert len(ids) <= MAX_SEQ_LEN and chat.session.turns[-2]["content"] == "number 11"


def test_a_message_over_the_context_is_refused_and_forgotten(chat):
    chat.handle("word " * 100)
    assert "write a shorter one" in shown(chat) and chat.session.turns == []


def test_a_question_that_the_template_refuses_is_forgotten(chat):
    class Refusing:
        def render(self, messages, add_generation_prompt=True):
            raise UserError("the template refuses the conversation; change the messages")

    chat.prompt.template = Refusing()
    chat.handle("Hi")
    assert "refuses" in shown(chat) and chat.session.turns == []


def test_text_of_the_model_cannot_drive_the_terminal(chat, monkeypatch):
    monkeypatch.setattr(chat.engine, "step", lambda step=chat.engine.step: [
        replace(event, text="\x1b]0;title\x07[bold]") for event in step()
    ])  # fmt: skip
    chat.handle("Hi")
    assert "\x1b" not in shown(chat) and "\x07" not in shown(chat) and "[bold]" in shown(chat)


COMMANDS = {
    "/temperature 0.5": lambda session: session.sampling.temperature == 0.5,
    "/top_k 7": lambda session: session.sampling.top_k == 7,
    "/seed 3": lambda session: session.sampling.seed == 3,
    "/max_new_tokens 9": lambda session: session.max_new_tokens == 9,
    "/system Be kind.": lambda session: session.messages() == [{"role": "system", "content": "Be kind."}],
    "/reset": lambda session: session.turns == [],
    "/undo": lambda session: session.turns == [],
    "/mode continue": lambda session: session.mode == "continue",
    "/confidence": lambda session: session.confidence,
    "/confidence off": lambda session: not session.confidence,
}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_change_the_session(line):
    session = ChatSession(
        SamplingConfig(), turns=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert session.command(line)
    assert COMMANDS[line](session)


WRONG = ["/temperature -1", "/temperature hot", "/temperature nan", "/top_k 1.5", "/top_p 0", "/nothing", "/mode x",
         "/max_new_tokens 0", "/confidence maybe", "/"]  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_wrong_commands_change_nothing_and_say_why(line):
    session = ChatSession(SamplingConfig())
    before = session.settings()
    with pytest.raises(UserError):
        session.command(line)
    assert session.settings() == before


def test_doubt_is_shaded_and_certainty_is_not():
    assert confidence_style(0.0).bgcolor is None
    levels = [confidence_style(log_prob).bgcolor.triplet.red for log_prob in (-0.5, -1.0, -5.0)]
    assert levels == sorted(levels) and levels[0] < levels[-1]
