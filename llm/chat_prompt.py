"""From messages to a model's prompt: the checkpoint's own chat template, or a plain form for a base model.

Without a template the conversation is written as

    system text

    User: question

    Assistant:

and the answer ends where the model would begin the next "User:". What a message says stays ordinary text: the name of
a special token inside it (<|im_end|>) is not turned into that token, so nobody can close their turn and open another's.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from configs.errors import UserError
from llm.bpe_tokenizer import Tokenizer
from llm.chat_template import GENERATION_FILE, load_chat_template, stop_ids

Messages = list[dict[str, str]]  # {"role": "system" | "user" | "assistant", "content": text}
PLAIN_STOP = "\nUser:"
END_OF_TURN_NAMES = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "</s>")
PRIVATE_USE = range(0xE000, 0xF8FF)


class Template(Protocol):
    def render(self, messages: Messages, add_generation_prompt: bool = True) -> str: ...


class ChatPrompt:
    """Encodes conversations and plain text for one model, and knows where an answer ends.

    start_ids: put before a text that is to be continued; None: the end-of-text token, which stands before every
    document of ours. stop_ids: end an answer beside the end-of-text token and the ends of turns that are known.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template | None = None,
        start_ids: list[int] | None = None,
        stop_ids: Iterable[int] = (),
    ):
        self.tokenizer = tokenizer
        self.template = template
        self.start_ids = [tokenizer.eot_id] if start_ids is None else start_ids
        specials = tokenizer.special_tokens
        turn_ends = [specials[name] for name in END_OF_TURN_NAMES if name in specials] if template else []
        self.stop_ids = tuple(dict.fromkeys([tokenizer.eot_id, *turn_ends, *stop_ids]))
        self.chat_stops = () if template else (PLAIN_STOP,)
        names = sorted(specials, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text that the model continues, behind the token that starts a document."""
        return self.start_ids + self.tokenizer.encode(text)

    def encode_chat(self, messages: Messages) -> list[int]:
        """The ids of a conversation up to where the assistant's next answer begins.

        Raises UserError where the template refuses the conversation (roles that do not alternate, for instance).
        """
        if self.template is None:
            return self.encode_text(plain_form(messages))
        guard = unused_character(messages)
        guarded = [message | {"content": self._guard(message["content"], guard)} for message in messages]
        return self._encode_rendered(self.template.render(guarded, add_generation_prompt=True), guard)

    def _guard(self, text: str, guard: str) -> str:
        """The text with `guard` put inside each special token's name in it."""
        if self._special is None:
            return text
        return self._special.sub(lambda match: match.group()[0] + guard + match.group()[1:], text)

    def _encode_rendered(self, text: str, guard: str) -> list[int]:
        """The ids of a rendered template: its special tokens are tokens, guarded names are text again."""
        if self._special is None:
            return self.tokenizer.encode(text.replace(guard, ""))
        ids = []
        for part in self._special.split(text):
            special = self.tokenizer.special_tokens.get(part)
            ids += [special] if special is not None else self.tokenizer.encode(part.replace(guard, ""))
        return ids


def plain_form(messages: Messages) -> str:
    """A conversation for a model that has no template, ending in "Assistant:"."""
    speakers = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    return "".join(f"{speakers[one['role']]}{one['content'].strip()}\n\n" for one in messages) + "Assistant:"


def unused_character(messages: Messages) -> str:
    """A private-use character that no message holds."""
    text = "".join(message["content"] for message in messages)
    for code in PRIVATE_USE:
        if chr(code) not in text:
            return chr(code)
    raise UserError("the messages hold every private-use character of Unicode; leave some of them out")


def load_chat_prompt(checkpoint: Path, tokenizer: Tokenizer, document_start: bool = True) -> ChatPrompt:
    """The prompt format of a checkpoint: its chat template and the ids that end its answers, if it has them.

    A text to be continued begins as in training: behind the end-of-text token for a model of ours, behind what
    tokenizer.json puts before a text for an imported one.
    """
    start_ids = []
    if document_start:
        imported = (checkpoint / GENERATION_FILE).is_file()
        start_ids = ids_before_text(tokenizer) if imported else [tokenizer.eot_id]
    return ChatPrompt(tokenizer, load_chat_template(checkpoint), start_ids, stop_ids(checkpoint))


def ids_before_text(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that tokenizer.json's post-processor (Hugging Face's TemplateProcessing) puts first."""
    processor = json.loads(tokenizer.content).get("post_processor") or {}
    for one in processor.get("processors", [processor]):
        if one.get("type") != "TemplateProcessing":
            continue
        first = one["single"][0].get("SpecialToken", {}).get("id")
        return [tokenizer.special_tokens[first]] if first in tokenizer.special_tokens else []
    return []
