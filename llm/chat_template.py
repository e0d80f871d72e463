"""A model's own chat template: messages to the text that it was trained on.

The template is Jinja from whoever published the model. It runs in Jinja's sandbox on copies made of plain JSON values,
so it reaches no file, no network and no Python object; a loop of its own can still waste time, and its output is cut
off at MAX_CHARS. Rendering equals transformers' apply_chat_template (tests/llm/test_chat_template.py).
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from configs.errors import UserError
from configs.run_dir import read_json

TEMPLATE_FILE, CONFIG_FILE, GENERATION_FILE = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
MAX_CHARS = 16_000_000
Message = dict[str, Any]


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant wrote; the text is the same without it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PlainNamespace(jinja2.utils.Namespace):
    """`namespace()` without names that begin with an underscore, which reach into Python."""

    def __init__(*args: Any, **kwargs: Any):
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the products and powers of a template kept small."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        count = [value for value in (left, right) if isinstance(value, int)]
        if sized and count and len(sized[0]) * count[0] > MAX_CHARS:
            raise SecurityError(f"a repetition of more than {MAX_CHARS} characters")
        small = all(isinstance(value, int | float) and abs(value) <= 1000 for value in (left, right))
        if operator == "**" and not small:
            raise SecurityError("a power of numbers above 1000")
        return super().call_binop(context, operator, left, right)


def refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not store the attribute {name!r}")


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter would escape HTML's characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def make_environment() -> Sandbox:
    """The environment that templates on the Hub are written for."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    return environment


class ChatTemplate:
    """One compiled template; `tokens` are the special tokens' names that it may use (bos_token, eos_token, ...)."""

    def __init__(self, source: str, tokens: dict[str, str] | None = None, where: str = TEMPLATE_FILE):
        self.source = source
        self.tokens = tokens or {}
        self.where = where
        try:
            self._template = make_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{where} is no Jinja template ({one_line(error)}); fetch it again") from error

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation's text, special tokens spelled out, up to where the assistant's next turn begins.

        Raises UserError when the template refuses the messages (roles that do not alternate, for instance), fails, or
        writes too much.
        """
        given = plain({"messages": without_none(messages), "tools": tools} | variables)
        parts, length = [], 0
        try:
            for part in self._template.generate(
                **self.tokens | given, add_generation_prompt=add_generation_prompt, documents=None
            ):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARS:
                    raise SecurityError(f"an output of more than {MAX_CHARS} characters")
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
            raise UserError(
                f"{self.where} refuses the conversation ({one_line(error)}); change the messages"
            ) from error
        return "".join(parts)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def without_none(messages: list[Message]) -> list[Message]:
    """Messages without the keys that hold None, which clients send and templates do not expect."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def plain(value: Any) -> Any:
    """A copy made of JSON's types alone: other objects have methods that a sandbox knows nothing of."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise UserError(f"a message holds a value of type {type(value).__name__}; use text, numbers, lists and objects")


def load_chat_template(directory: str | Path) -> ChatTemplate | None:
    """The template beside a checkpoint or tokenizer, or None; UserError when it cannot be read."""
    directory = Path(directory)
    config = read_object(directory / CONFIG_FILE)
    tokens = {name: token_text(config.get(name)) for name in TOKEN_NAMES if config.get(name) is not None}
    path = directory / TEMPLATE_FILE
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), tokens, str(path))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 ({error}); fetch it again") from error
    source = config.get("chat_template")
    return ChatTemplate(source, tokens, str(directory / CONFIG_FILE)) if isinstance(source, str) else None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object file, {} when there is none."""
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise UserError(f"{path} is no JSON object; fetch it again")
    return value


def token_text(token: Any) -> str:
    """A special token in tokenizer_config.json: its text, or an object that holds it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def stop_ids(directory: str | Path) -> list[int]:
    """The ids that end an answer, by the generation_config.json beside a checkpoint; empty without one."""
    found = read_object(Path(directory) / GENERATION_FILE).get("eos_token_id")
    found = found if isinstance(found, list) else [found]
    return [token_id for token_id in found if type(token_id) is int]
