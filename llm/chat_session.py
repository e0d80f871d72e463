"""A conversation in memory: its turns, its settings, and the commands that change them. No terminal, no model.

A command begins with a slash. `command` returns the line to show, or raises UserError with what was wrong.
"""

import math
from dataclasses import dataclass, field, replace

from configs.errors import UserError
from llm.chat_prompt import ChatPrompt, Messages
from llm.sampling import SamplingConfig

MODES = ("chat", "continue")
HELP = """/reset               forget the conversation
/undo                forget the last question and its answer
/temperature 0.8     also /top_p, /top_k, /min_p, /repetition_penalty, /seed, /max_new_tokens
/system TEXT         the system message (nothing: none), and forget the conversation
/mode continue       continue each text instead of answering it (/mode chat: back)
/confidence on       shade each token by its probability (off: no more)
/settings            what is set now
/quit                end (also Ctrl-D); Ctrl-C stops an answer"""
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


@dataclass
class ChatSession:
    """mode: "chat" sends the conversation, "continue" only the text typed, to be continued."""

    sampling: SamplingConfig
    max_new_tokens: int = 512
    mode: str = "chat"
    confidence: bool = False
    system: str = ""
    turns: Messages = field(default_factory=list)
    num_answers: int = 0  # each answer's dice are its number's

    def messages(self) -> Messages:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Keep an answer; an empty one takes its question along."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.drop_question()

    def drop_question(self) -> None:
        """Forget a question that got no answer, since turns have to alternate."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def prompt_ids(self, prompt: ChatPrompt, max_prompt_tokens: int) -> tuple[list[int], int]:
        """The conversation's ids, and how many of its oldest turns had to be forgotten for them to fit.

        A quarter of the context at least is left for the answer. Raises UserError when the last turn alone is too long.
        """
        room = max(1, max_prompt_tokens * 3 // 4)
        dropped = 0
        while True:
            ids = prompt.encode_chat(self.messages())
            if len(ids) <= room or (len(self.turns) == 1 and len(ids) <= max_prompt_tokens):
                return ids, dropped
            if len(self.turns) == 1:
                raise UserError(f"the message has {len(ids)} tokens and {max_prompt_tokens} fit; write a shorter one")
            del self.turns[:2]  # a question with its answer
            dropped += 2

    def command(self, line: str) -> str:
        """Carry out "/name argument"; returns what to show."""
        name, _, argument = line[1:].partition(" ")
        name, argument = name.strip().lower(), argument.strip()
        if name == "reset":
            self.turns.clear()
            return "the conversation is forgotten"
        if name == "undo":
            del self.turns[-2:]
            return f"{len(self.turns) // 2} answers are left"
        if name == "system":
            self.system = argument
            self.turns.clear()
            return "the system message is set, the conversation forgotten" if argument else "no system message"
        if name == "help":
            return HELP
        if name == "settings":
            return self.settings()
        return self.set(name, argument)

    def set(self, name: str, argument: str) -> str:
        """Change one setting by its name."""
        if name == "mode":
            if argument not in MODES:
                raise UserError(f"mode {argument!r} is unknown; use /mode chat or /mode continue")
            self.mode = argument
        elif name == "confidence":
            if argument not in ("", "on", "off"):
                raise UserError(f"confidence {argument!r} is unknown; use /confidence on or /confidence off")
            self.confidence = argument == "on" if argument else not self.confidence
            argument = "on" if self.confidence else "off"
        elif name == "max_new_tokens":
            value = number(name, argument, whole=True)
            if value < 1:
                raise UserError(f"max_new_tokens={argument} must be positive; use 1 or more")
            self.max_new_tokens = value
        elif name in NUMBERS:
            whole = isinstance(getattr(self.sampling, name), int)
            self.sampling = replace(self.sampling, **{name: number(name, argument, whole)})
        else:
            raise UserError(f"/{name} is no command; /help lists them")
        return f"{name} {argument}"

    def settings(self) -> str:
        values = {name: getattr(self.sampling, name) for name in NUMBERS}
        values |= {"max_new_tokens": self.max_new_tokens, "mode": self.mode, "system": self.system or "none"}
        return "\n".join(f"{name} {value}" for name, value in values.items())


def number(name: str, text: str, whole: bool) -> float | int:
    """The number that `text` says; UserError when it says none, or one that is not finite."""
    kind = "a whole number" if whole else "a number"
    wrong = UserError(f"{name} {text!r} is not {kind}; write, for example, /{name} 1")
    try:
        value = int(text) if whole else float(text)
    except ValueError as error:
        raise wrong from error
    if not math.isfinite(value):
        raise wrong
    return value
