"""A chat model's prompt through its own template, with a question that cannot speak the template's language.

The template is rendered with a placeholder in the question's place. Special tokens are looked for in what the template
wrote, never in the question, so a question that spells "<|im_end|>" stays text. Ordinary text between two special
tokens is encoded as a whole, question and surroundings together, which is how Hugging Face encodes it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import UserError, missing_extra
from llm.bpe_tokenizer import Tokenizer

# (messages, add_generation_prompt) -> the conversation's text, special tokens spelled out
ChatTemplate = Callable[[list[dict[str, Any]], bool], str]
PLACEHOLDER = "\ue000question\ue001"
REPLY = "\ue000reply\ue001"


def encode_chat(chat: ChatTemplate, request: str, question: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of the conversation up to the assistant's turn; UserError when the template drops or doubles the question."""
    content = request.format(question=PLACEHOLDER)
    rendered = chat([{"role": "user", "content": content}], True)
    if rendered.count(PLACEHOLDER) != 1:
        raise UserError(f"the chat template writes the user's text {rendered.count(PLACEHOLDER)} times; it must once")
    ids: list[int] = []
    for token_id, text in special_segments(rendered, tokenizer):
        if token_id is not None:
            ids.append(token_id)
        elif text:
            ids += tokenizer.encode(text.replace(PLACEHOLDER, question))
    return ids


def chat_end_id(chat: ChatTemplate, tokenizer: Tokenizer) -> int:
    """The special token that the template writes right behind an assistant's reply."""
    messages = [{"role": "user", "content": PLACEHOLDER}, {"role": "assistant", "content": REPLY}]
    rendered = chat(messages, False)
    _, found, behind = rendered.rpartition(REPLY)
    for token_id, _ in special_segments(behind if found else "", tokenizer):
        if token_id is not None:
            return token_id
    raise UserError("the chat template writes no special token behind a reply; use template=r1_zero")


def load_chat(directory: str | Path) -> ChatTemplate | None:
    """The template beside a checkpoint, rendered in a sandbox (llm/chat_template.py); None when there is none."""
    try:
        from llm.chat_template import load_chat_template
    except ImportError as error:
        raise missing_extra(error.name or "jinja2", "align") from error
    template = load_chat_template(directory)
    return None if template is None else template.render


def special_segments(text: str, tokenizer: Tokenizer) -> list[tuple[int | None, str]]:
    """The text cut at its special tokens: (id, "") for one, (None, text) for what lies between."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    segments, done = [], 0
    for match in re.finditer("|".join(map(re.escape, names)) or "(?!)", text):
        segments += [(None, text[done : match.start()]), (tokenizer.special_tokens[match.group()], "")]
        done = match.end()
    return [*segments, (None, text[done:])]
