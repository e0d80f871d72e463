"""Values of expression trees to 40 digits: what exact arithmetic cannot decide, a few points usually can.

Two expressions that differ at one point where both have a value are different. Two that agree to 30 digits at several
points are taken as equal: answers are short, and no answer of a few signs agrees so far by chance. A decimal such as
3.14159265358979 has too few digits to be taken for pi. Arguments are bounded, so that every evaluation is quick.

Without an i in them, expressions are real: a point where part of one is not (the logarithm of a negative number) is
passed over, so ln(x^2) is 2 ln(x), and odd roots of negative numbers are the real ones.
"""

from fractions import Fraction
from typing import Any

from alignment.drgrpo_grader_latex import Tree

DIGITS = 40
AGREE_DIGITS = 30
MAX_EXPONENT = 2_000
MAX_ARGUMENT = 10**6
# Values of the variables at each point; which variable gets which value goes by the order of their names.
POINTS = [
    [Fraction(p, q) for p, q in row]
    for row in [
        [(137, 100), (71, 90), (223, 110), (31, 70), (263, 130), (19, 17)],
        [(41, 60), (173, 80), (53, 47), (97, 120), (11, 13), (239, 140)],
        [(293, 150), (29, 37), (61, 51), (157, 90), (43, 71), (103, 77)],
        [(-83, 60), (-37, 55), (121, 90), (-149, 110), (67, 80), (-23, 29)],
    ]
]


class NoValue(ValueError):
    """The tree has no value that may be computed here: undefined, infinite, or beyond a limit."""


def variables(tree: Tree) -> set[str]:
    if tree[0] == "var":
        return {tree[1]}
    return set().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))


def has_i(tree: Tree) -> bool:
    return tree == ("const", "i") or any(has_i(part) for part in tree[1:] if isinstance(part, tuple))


def equal_numerically(left: Tree, right: Tree) -> bool | None:
    """Whether two trees agree at the points where both have values; None when there are too few such points."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    names = sorted(variables(left) | variables(right))
    is_real = not (has_i(left) or has_i(right))
    if len(names) > len(POINTS[0]):
        return None
    agreed = 0
    points = POINTS if names else POINTS[:1]
    for point in points:
        values = dict(zip(names, point, strict=False))
        try:
            a, b = (Evaluation(context, values, is_real).value(tree) for tree in (left, right))
        except (NoValue, ValueError, ZeroDivisionError, OverflowError, TypeError):
            continue  # mpmath raises these where a function has no value
        if not (context.isfinite(a) and context.isfinite(b)):
            continue
        if abs(a - b) > context.mpf(10) ** -AGREE_DIGITS * max(1, abs(a), abs(b)):
            return False
        agreed += 1
    return True if agreed >= min(2, len(points)) else None


def rational_of(tree: Tree) -> Fraction | None:
    """The value of an exponent that is made of numbers by signs and fraction bars, else None."""
    if tree[0] == "num":
        return tree[1]
    if tree[0] == "neg":
        inner = rational_of(tree[1])
        return None if inner is None else -inner
    if tree[0] not in ("add", "mul", "div"):
        return None
    one, other = rational_of(tree[1]), rational_of(tree[2])
    if one is None or other is None or (tree[0] == "div" and not other):
        return None
    return one + other if tree[0] == "add" else one * other if tree[0] == "mul" else one / other


class Evaluation:
    """The value of a tree at one point, in one mpmath context."""

    def __init__(self, context: Any, values: dict[str, Fraction], is_real: bool):
        self.context = context
        self.values = values
        self.is_real = is_real

    def value(self, tree: Tree) -> Any:
        kind = tree[0]
        if kind == "num" or kind == "var":
            number = tree[1] if kind == "num" else self.values[tree[1]]
            return self.context.mpf(number.numerator) / number.denominator
        if kind == "const":
            return self.constant(tree[1])
        if kind == "neg":
            return -self.value(tree[1])
        if kind == "fn":
            return self.checked(self.function(tree[1], [self.value(part) for part in tree[2:]]))
        a, b = self.value(tree[1]), self.value(tree[2])
        if kind == "add":
            return a + b
        if kind == "mul":
            return a * b
        if kind == "div":
            return a / b
        exponent = rational_of(tree[2])
        if exponent is not None and exponent.denominator % 2 and a.imag == 0 and a.real < 0:
            sign = -1 if exponent.numerator % 2 else 1
            return sign * self.power(-a, b)  # the real root
        return self.checked(self.power(a, b))

    def checked(self, value: Any) -> Any:
        if self.is_real and value.imag != 0:
            raise NoValue("no real value")
        return value

    def constant(self, name: str) -> Any:
        if name == "inf":
            raise NoValue("infinity")
        return {"pi": self.context.pi, "e": self.context.e, "i": self.context.mpc(0, 1)}[name] * 1

    def power(self, base: Any, exponent: Any) -> Any:
        if abs(exponent) > MAX_EXPONENT or (base == 0 and exponent == 0):
            raise NoValue("a power beyond the limits")
        return self.context.power(base, exponent)

    def function(self, name: str, arguments: list[Any]) -> Any:
        first = arguments[0]
        if abs(first) > MAX_ARGUMENT:
            raise NoValue("an argument beyond the limits")
        if name == "log":
            base = arguments[1] if len(arguments) > 1 else 10
            return self.context.log(first) / self.context.log(base)
        if name in ("factorial", "binom"):
            if any(abs(one) > 200 for one in arguments):
                raise NoValue("a factorial beyond the limits")
            return getattr(self.context, name)(*arguments)
        if name in ("gcd", "floor", "ceil") or len(arguments) != 1:
            raise NoValue(f"{name} has no value here")
        if name == "exp" and abs(first) > MAX_EXPONENT:
            raise NoValue("a power beyond the limits")
        names = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "abs": "fabs"}
        return getattr(self.context, names.get(name, name))(first)
