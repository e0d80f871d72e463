"""The one exception that means "the input is wrong", told apart from a fault of ours.

A script catches UserError, prints its single line and exits with 2; every other exception keeps its traceback.
"""


class UserError(ValueError):
    """A user's mistake: the message holds the value, the rule and the fix, in one line."""


def check_choice(name: str, value: str, choices: tuple[str, ...] | list[str]) -> None:
    """Raise UserError unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")


def check_positive(**values: float) -> None:
    """Raise UserError for the first value that is not above zero."""
    for name, value in values.items():
        if value <= 0:
            raise UserError(f"{name}={value} must be positive; use a value above 0")


def missing_extra(package: str, extra: str) -> UserError:
    """The error for an optional package that is not installed."""
    return UserError(f"{package} is not installed; run: pip install -e '.[{extra}]'")
