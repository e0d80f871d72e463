"""A small parser for the LaTeX and plain text that answers are written in, to a tree; limits on tokens and depth.

Nothing is evaluated here: text that this grammar does not know raises NotParsed, and a tower of powers is a tree of
three nodes like any other. A tree is a tuple: ("num", Fraction), ("var", name), ("const", "pi" | "e" | "i" | "inf"),
("add" | "mul", left, right), ("neg", a), ("div", a, b), ("pow", a, b), ("fn", name, a[, b]).
"""

import re
from fractions import Fraction

MAX_TOKENS = 300
MAX_DEPTH = 40
MAX_NUMBER_CHARS = 100

TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>\d+(?:\.\d+)?|\.\d+)|\\(?P<command>[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<sign>\*\*|[-+*/^_()\[\]{}|!'])"
)
FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
    "ln",
    "log",
}
FUNCTIONS |= {"exp", "abs", "sqrt", "gcd", "floor", "ceil"}
GREEK = (
    "alpha beta gamma delta epsilon varepsilon theta lambda mu nu rho sigma tau phi varphi omega psi chi eta".split()
)
OPERATORS = {
    "cdot": "*",
    "times": "*",
    "ast": "*",
    "div": "/",
    "lbrace": "(",
    "rbrace": ")",
    "lvert": "|",
    "rvert": "|",
}
OPERATORS |= {"vert": "|", "mid": "|", "lparen": "(", "rparen": ")"}
CLOSERS = {"(": ")", "[": "]", "{": "}"}
Tree = tuple


class NotParsed(ValueError):
    """The text is not an expression of this grammar."""


def tokenize(text: str, letters: bool = False) -> list[tuple[str, str]]:
    """(kind, value) pairs; kinds: number, name, fn, frac, sqrt, binom, sign."""
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise NotParsed(f"character {text[position]!r}")
        position = match.end()
        if match["space"] is None:
            tokens += token_of(match, alone=not letters and match.end() - match.start() == len(text))
        if len(tokens) > MAX_TOKENS:
            raise NotParsed(f"more than {MAX_TOKENS} tokens")
    return tokens


def token_of(match: re.Match, alone: bool) -> list[tuple[str, str]]:
    if match["number"]:
        if len(match["number"]) > MAX_NUMBER_CHARS:
            raise NotParsed("a number too long")
        if match["number"] == "0" and match.string[match.end() : match.end() + 1].isalpha():
            raise NotParsed("a letter on a zero: 0x1f is no product")
        return [("number", match["number"])]
    if match["sign"]:
        return [("sign", "^" if match["sign"] == "**" else match["sign"])]
    name = match["command"] or match["word"]
    if match["command"]:
        if name in OPERATORS:
            return [("sign", OPERATORS[name])]
        if name in ("frac", "sqrt", "binom"):
            return [(name, name)]
    if name in FUNCTIONS:
        return [("sqrt", name)] if name == "sqrt" else [("fn", name)]
    if name in ("pi", "infty", "inf", *GREEK):
        return [("name", "inf" if name == "infty" else name)]
    if match["command"] or (alone and len(name) > 1) or len(name) > 3:
        raise NotParsed(f"word {name!r}")  # "evelyn" is text, "xy" beside signs is a product
    return [("name", letter) for letter in name]


def parse_expression(text: str, letters: bool = False) -> Tree:
    """The tree of the whole text; NotParsed when it is no expression or exceeds a limit.

    A text of two or three letters alone is a word, unless `letters` says that it is a product.
    """
    parser = Parser(tokenize(text, letters))
    tree = parser.sum(0)
    if parser.position < len(parser.tokens):
        raise NotParsed(f"unexpected {parser.tokens[parser.position][1]!r}")
    return tree


class Parser:
    """Recursive descent: sum > product > signed > power > factorial > atom; every level counts its depth."""

    def __init__(self, tokens: list[tuple[str, str]]):
        self.tokens = tokens
        self.position = 0
        self.bars = 0  # how many |...| are open

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.position] if self.position < len(self.tokens) else ("end", "")

    def take(self, value: str | None = None) -> str:
        kind, found = self.peek()
        if kind == "end" or (value is not None and (kind, found) != ("sign", value)):
            raise NotParsed(f"expected {value!r}, found {found!r}")
        self.position += 1
        return found

    def is_sign(self, *values: str) -> bool:
        kind, found = self.peek()
        return kind == "sign" and found in values

    def sum(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise NotParsed(f"deeper than {MAX_DEPTH}")
        tree = self.product(depth + 1)
        while self.is_sign("+", "-"):
            sign = self.take()
            right = self.product(depth + 1)
            tree = ("add", tree, right if sign == "+" else ("neg", right))
        return tree

    def product(self, depth: int) -> Tree:
        tree = self.signed(depth)
        while True:
            if self.is_sign("*", "/"):
                kind = "mul" if self.take() == "*" else "div"
                tree = (kind, tree, self.signed(depth))
            elif self.starts_factor():
                behind_number = self.tokens[self.position - 1][0] == "number"
                if self.peek()[0] == "number" and behind_number:
                    raise NotParsed("two numbers side by side")
                is_fraction = self.peek()[0] == "frac"
                right = self.power(depth)
                mixed = behind_number and is_fraction and is_proper_fraction(right)
                tree = ("add" if mixed else "mul", tree, right)  # 2\frac{1}{2} is two and a half
            else:
                return tree

    def starts_factor(self) -> bool:
        kind, value = self.peek()
        if kind == "sign":
            return value in "([{" or (value == "|" and self.bars == 0)
        return kind != "end"

    def signed(self, depth: int) -> Tree:
        negative = False
        for _ in range(3):
            if not self.is_sign("+", "-"):
                break
            negative ^= self.take() == "-"
        tree = self.power(depth)
        return ("neg", tree) if negative else tree

    def power(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise NotParsed(f"deeper than {MAX_DEPTH}")
        base = self.atom(depth + 1)
        while self.is_sign("!"):
            self.take()
            base = ("fn", "factorial", base)
        if self.is_sign("^"):
            self.take()
            return ("pow", base, self.exponent(depth + 1))
        return base

    def exponent(self, depth: int) -> Tree:
        if self.is_sign("+", "-"):
            return ("neg", self.power(depth)) if self.take() == "-" else self.power(depth)
        return self.power(depth)

    def atom(self, depth: int) -> Tree:
        kind, value = self.peek()
        if kind == "number":
            self.take()
            return self.subscripted(value) or ("num", Fraction(value))
        if kind == "name":
            self.take()
            return self.subscripted(value) or named(value)
        if kind == "sign" and value in CLOSERS:
            self.take()
            tree = self.sum(depth + 1)
            self.take(CLOSERS[value])
            return tree
        if kind == "sign" and value == "|":
            return self.absolute(depth)
        if kind in ("frac", "binom"):
            self.take()
            over, under = self.argument(depth), self.argument(depth)
            return ("div", over, under) if kind == "frac" else ("fn", "binom", over, under)
        if kind == "sqrt":
            return self.root(depth)
        if kind == "fn":
            return self.function(depth)
        raise NotParsed(f"unexpected {value!r}")

    def subscripted(self, value: str) -> Tree | None:
        """A name with an index, x_1 or 204_5, is one name of its own; None when there is no index."""
        if not self.is_sign("_"):
            return None
        self.take()
        braced = self.is_sign("{")
        if braced:
            self.take()
        kind, index = self.peek()
        if kind not in ("number", "name"):
            raise NotParsed(f"index {index!r}")
        self.take()
        if braced:
            self.take("}")
        return ("var", f"{value}_{index}")

    def absolute(self, depth: int) -> Tree:
        self.take("|")
        self.bars += 1
        tree = self.sum(depth + 1)
        self.take("|")
        self.bars -= 1
        return ("fn", "abs", tree)

    def argument(self, depth: int) -> Tree:
        """What LaTeX takes as an argument: a group in braces, or one digit, letter or command."""
        kind, value = self.peek()
        if kind == "number" and len(value) > 1 and "." not in value:
            self.tokens[self.position] = ("number", value[1:])  # \frac12 is 1/2, \sqrt23 is sqrt(2) 3
            return ("num", Fraction(value[0]))
        return self.atom(depth + 1)

    def root(self, depth: int) -> Tree:
        is_plain_call = self.take() == "sqrt" and self.is_sign("(")
        degree: Tree = ("num", Fraction(2))
        if self.is_sign("["):
            self.take()
            degree = self.sum(depth + 1)
            self.take("]")
        under = self.atom(depth + 1) if is_plain_call else self.argument(depth)
        return ("pow", under, ("div", ("num", Fraction(1)), degree))

    def function(self, depth: int) -> Tree:
        name = self.take()
        base = power = None
        for _ in range(2):
            if self.is_sign("_") and base is None:
                self.take()
                base = self.argument(depth)
            elif self.is_sign("^") and power is None:
                self.take()
                power = self.exponent(depth + 1)
        if power == ("neg", ("num", Fraction(1))) and name in ("sin", "cos", "tan"):
            name, power = f"arc{name}", None  # sin^{-1} is the inverse function by custom
        argument = self.function_argument(depth)
        tree: Tree = ("fn", name, argument) if base is None else ("fn", name, argument, base)
        return tree if power is None else ("pow", tree, power)

    def function_argument(self, depth: int) -> Tree:
        """A group, or the factors up to the next sign or function: sin 2x is sin(2x)."""
        if self.is_sign("(", "{", "["):
            return self.atom(depth + 1)
        tree = self.power(depth + 1)
        while self.starts_factor() and self.peek()[0] in ("number", "name", "frac"):
            tree = ("mul", tree, self.power(depth + 1))
        return tree


def is_proper_fraction(tree: Tree) -> bool:
    if tree[0] != "div" or tree[1][0] != "num" or tree[2][0] != "num":
        return False
    over, under = tree[1][1], tree[2][1]
    return over < under and over.denominator == under.denominator == 1


def named(name: str) -> Tree:
    return ("const", name) if name in ("pi", "e", "i", "inf") else ("var", name)
