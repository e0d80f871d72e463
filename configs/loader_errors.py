"""What Hydra and OmegaConf raise about a command line or a config file, said in one line: value, rule, fix.

Their own messages are pages that end in exit code 1. What they know is kept (the key, its type, the choices of a group)
and what a user wants beside it is added: the nearest key or choice by spelling.
"""

import difflib
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from configs.errors import UserError

ALL_KEYS = "--cfg job prints every key"
MAX_CHARACTERS = 300  # of a message that no rule here knows


def known_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted key below a config dataclass with its type; a dataclass in it stands before its own fields."""
    found: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for field in fields(schema):
        hint = hints[field.name]
        found[prefix + field.name] = hint
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner):
                found |= known_keys(inner, f"{prefix}{field.name}.")
    return found


def nearest_key(key: str, keys: list[str]) -> str | None:
    """The known key that `key` was meant to be: the same last name elsewhere, else the nearest spelling, else None."""
    last = key.rpartition(".")[2]
    elsewhere = [known for known in keys if known.rpartition(".")[2] == last]
    by_spelling = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    names = {known.rpartition(".")[2]: known for known in reversed(keys)}
    by_last_name = [names[name] for name in difflib.get_close_matches(last, list(names), n=1, cutoff=0.75)]
    return next(iter([*elsewhere, *by_spelling, *by_last_name]), None)


def config_error(error: Exception, schema: type, overrides: list[str]) -> UserError:
    """The UserError, in one line, for what composing or merging a config of `schema` raised.

    `overrides` are the command line's: the one that names the key at fault is shown as it was written.
    """
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(error, OverrideParseException):
        return UserError(f"{error.override!r} is no override; write key=value, and quote lists and spaces: 'key=[1,2]'")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        return UserError(missing_choice(error.missing_cfg_file, list(error.options)))
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        return UserError(unknown_key(cause.full_key, schema, overrides))
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return UserError(wrong_value(cause, schema, overrides))
    words = " ".join(f"{error} {error.__cause__ or ''}".split())
    if words.startswith("Multiple values for"):
        return UserError(f"{words.split('. ')[0]}: it has one already; write the choice without a +")
    return UserError(f"{words[:MAX_CHARACTERS]}; {ALL_KEYS}")


def as_written(key: str, overrides: list[str]) -> str:
    """The override of `key`, or of a key below it, as the user wrote it; the key alone where a file sets it."""
    named = [(text.lstrip("+~").partition("=")[0], text) for text in overrides]
    return next((text for name, text in named if name == key or name.startswith(f"{key}.")), key)


def unknown_key(key: str, schema: type, overrides: list[str]) -> str:
    written = as_written(key, overrides)
    near = nearest_key(written.lstrip("+~").partition("=")[0], list(known_keys(schema)))
    fix = f"did you mean {near}? ({ALL_KEYS})" if near else ALL_KEYS
    return f"{written}: {schema.__name__} has no such key; {fix}"


def missing_choice(path: str, options: list[str]) -> str:
    group, _, name = path.rpartition("/")
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]}? " if near else ""
    return f"{group}={name}: there is no configs/{path}.yaml; {fix}the choices are {', '.join(options)}"


def wrong_value(error: OmegaConfBaseException, schema: type, overrides: list[str]) -> str:
    """A value that the key's type refuses, or one that must be given and is not."""
    reason = str(error).strip().splitlines()[0]
    if "missing mandatory value" in reason.lower():
        return f"{error.full_key} must be given; add {error.full_key}=... to the command line"
    hint = known_keys(schema).get(error.full_key)
    wanted = getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
    fix = f"give {error.full_key} a value of type {wanted}" if isinstance(error, ValidationError) and hint else ALL_KEYS
    return f"{as_written(error.full_key, overrides)}: {reason[0].lower()}{reason[1:]}; {fix}"
