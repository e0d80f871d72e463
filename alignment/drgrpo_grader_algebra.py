"""Exact arithmetic on expression trees: rational functions over Q with roots, i, pi, e and variables as symbols.

A value is a quotient of two polynomials. A polynomial maps monomials to coefficients; a monomial is a sorted tuple of
(symbol, exponent). Roots of numbers are fractional powers of primes, so that sqrt(2) sqrt(6) = 2 sqrt(3) and
1/sqrt(2) = sqrt(2)/2 need no rule of their own. Products of such powers are linearly independent over Q, so with
variables and one of pi and e, two values are equal exactly when their difference has no terms left. Sizes are bounded:
TooBig is raised instead of computing for long.
"""

import math
from fractions import Fraction

from alignment.drgrpo_grader_latex import Tree
from alignment.drgrpo_grader_work import Work

MAX_TERMS = 400
MAX_PRODUCTS = 8_000  # of monomials, in one comparison: about a quarter of a second
MAX_POWER = 64
MAX_BITS = 4_096
MAX_DIVISOR = 1_000
Monomial = tuple
Polynomial = dict


class TooBig(ValueError):
    """The exact form would exceed a limit, or the tree has something without an exact form."""


class Undefined(ValueError):
    """The expression has no value: a division by zero."""


ONE: Polynomial = {(): Fraction(1)}
Quotient = tuple[Polynomial, Polynomial]


def equal_exactly(left: Tree, right: Tree, work: Work) -> bool | None:
    """Whether two trees are equal; None when only opaque functions are left to decide. TooBig, Undefined."""
    expansion = Expansion(work)
    (a, b), (c, d) = expansion.quotient(left), expansion.quotient(right)
    difference = added(expansion.product(a, d), expansion.product(c, b), Fraction(-1))
    if not difference:
        return True
    symbols = {symbol for monomial in difference for symbol, _ in monomial}
    if any(symbol[0] == "opaque" for symbol in symbols) or {("const", "pi"), ("const", "e")} <= symbols:
        return None
    return False


def proportional(left: Tree, right: Tree, work: Work) -> bool:
    """Whether left = k right for a rational k other than zero, opaque functions taken as symbols. TooBig, Undefined."""
    expansion = Expansion(work)
    (a, b), (c, d) = expansion.quotient(left), expansion.quotient(right)
    one, other = expansion.product(a, d), expansion.product(c, b)
    if not one or set(one) != set(other):
        return one == other
    return len({one[monomial] / other[monomial] for monomial in one}) == 1


class Expansion:
    """Expands trees to quotients of polynomials, within MAX_PRODUCTS multiplications for all of them together."""

    def __init__(self, work: Work):
        self.work = work
        self.products = 0

    def quotient(self, tree: Tree) -> Quotient:
        kind = tree[0]
        if kind == "num":
            return constant(tree[1]), ONE
        if kind == "var" or (kind == "const" and tree[1] != "inf"):
            return symbol_power((kind, tree[1]), Fraction(1))
        if kind == "neg":
            a, b = self.quotient(tree[1])
            return {monomial: -value for monomial, value in a.items()}, b
        if kind in ("add", "mul", "div"):
            return self.combined(kind, self.quotient(tree[1]), self.quotient(tree[2]))
        if kind == "pow":
            top, bottom = self.quotient(tree[2])
            exponent = plain_number((top, bottom))
            return opaque(tree) if exponent is None else self.power(self.quotient(tree[1]), exponent, tree)
        if kind == "fn" and tree[1] in ("factorial", "binom"):
            return constant(counted(tree[1], [plain_number(self.quotient(part)) for part in tree[2:]])), ONE
        return opaque(tree)

    def combined(self, kind: str, left: Quotient, right: Quotient) -> Quotient:
        (a, b), (c, d) = left, right
        if kind == "mul":
            return self.product(a, c), self.product(b, d)
        if kind == "div":
            if not c:
                raise Undefined("division by zero")
            return self.product(a, d), self.product(b, c)
        if b == d:
            return added(a, c, Fraction(1)), b
        return added(self.product(a, d), self.product(c, b), Fraction(1)), self.product(b, d)

    def product(self, a: Polynomial, b: Polynomial) -> Polynomial:
        if a is ONE or b is ONE:
            return b if a is ONE else a
        self.products += len(a) * len(b)
        self.work.spend(len(a) * len(b))
        if self.products > MAX_PRODUCTS:
            raise TooBig("too many products")
        total: Polynomial = {}
        for one, x in a.items():
            for other, y in b.items():
                monomial, factor = joined(one, other)
                value = total.get(monomial, 0) + x * y * factor
                if value and value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
                    raise TooBig("a coefficient of too many digits")
                total[monomial] = value
        if len(total) > MAX_TERMS:
            raise TooBig("too many terms")
        return {monomial: value for monomial, value in total.items() if value}

    def power(self, base: Quotient, exponent: Fraction, tree: Tree) -> Quotient:
        """A base to a rational power."""
        if exponent.denominator == 1:
            return self.whole_power(base, exponent.numerator)
        value = plain_number(base)
        if value is not None and exponent.denominator <= 12 and abs(exponent) <= MAX_POWER:
            if value == 0 and exponent > 0:
                return {}, ONE
            if value > 0:
                over, under = prime_powers(value.numerator, exponent), prime_powers(value.denominator, -exponent)
                return self.product(over, under), ONE
            if value < 0 and exponent.denominator % 2:  # the real root, as in the cube root of -8
                positive, _ = self.power(({(): -value}, ONE), exponent, tree)
                return self.product(positive, {(): Fraction((-1) ** exponent.numerator)}), ONE
            if value < 0 and exponent.denominator == 2:
                positive, _ = self.power(({(): -value}, ONE), exponent, tree)
                monomial, factor = joined(((("const", "i"), Fraction(exponent.numerator)),), ())
                return self.product(positive, {monomial: factor}), ONE
        symbol = sole_symbol(base)
        return opaque(tree) if symbol is None else symbol_power(symbol, exponent)

    def whole_power(self, base: Quotient, exponent: int) -> Quotient:
        a, b = base
        if exponent < 0:
            if not a:
                raise Undefined("zero to a negative power")
            a, b, exponent = b, a, -exponent
        value = plain_number((a, b))
        if value is not None:
            if max(value.numerator.bit_length(), value.denominator.bit_length()) * exponent > MAX_BITS:
                raise TooBig("a power of too many digits")
            return constant(value**exponent), ONE
        terms = max(len(a), len(b))
        if exponent > MAX_POWER or math.comb(exponent + terms - 1, exponent) > MAX_TERMS:
            raise TooBig("a high power")
        top, bottom = ONE, ONE
        for _ in range(exponent):
            top, bottom = self.product(top, a), self.product(bottom, b)
        return top, bottom


def constant(value: Fraction) -> Polynomial:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise TooBig("a number of too many digits")
    return {(): value} if value else {}


def symbol_power(symbol: tuple, exponent: Fraction) -> Quotient:
    return {((symbol, exponent),): Fraction(1)}, ONE


def opaque(tree: Tree) -> Quotient:
    """Something without an exact form here, as a symbol of its own: equal only to itself."""
    return symbol_power(("opaque", repr(tree)), Fraction(1))


def plain_number(quotient: Quotient) -> Fraction | None:
    """The rational value of a quotient, or None when it is not a plain number."""
    top, bottom = quotient
    if set(top) <= {()} and set(bottom) == {()}:
        return top.get((), Fraction(0)) / bottom[()]
    return None


def added(a: Polynomial, b: Polynomial, factor: Fraction) -> Polynomial:
    total = dict(a)
    for monomial, value in b.items():
        new = total.get(monomial, 0) + factor * value
        if new:
            total[monomial] = new
        else:
            total.pop(monomial, None)
    if len(total) > MAX_TERMS:
        raise TooBig("too many terms")
    return total


def joined(one: Monomial, other: Monomial) -> tuple[Monomial, Fraction]:
    """The product of two monomials: the monomial, and the rational factor that whole powers of primes and i leave."""
    exponents = dict(one)
    for symbol, exponent in other:
        exponents[symbol] = exponents.get(symbol, Fraction(0)) + exponent
    factor = Fraction(1)
    for symbol, exponent in list(exponents.items()):
        if symbol[0] == "prime":
            whole = exponent.numerator // exponent.denominator
            if abs(whole) * symbol[1].bit_length() > MAX_BITS:
                raise TooBig("a power of a prime")
            factor *= Fraction(symbol[1]) ** whole
            exponents[symbol] = exponent - whole
        elif symbol == ("const", "i"):
            factor *= -1 if exponent % 4 in (2, 3) else 1
            exponents[symbol] = exponent % 2
        if not exponents[symbol]:
            del exponents[symbol]
        elif abs(exponents[symbol]) > 4 * MAX_POWER:
            raise TooBig("a high power")
    return tuple(sorted(exponents.items(), key=repr)), factor


def sole_symbol(base: Quotient) -> tuple | None:
    """The symbol when the base is one variable, pi or e alone: sqrt(x) sqrt(x) = x, but sqrt(x^2) stays as it is."""
    if base[1] == ONE and len(base[0]) == 1:
        ((monomial, value),) = base[0].items()
        if value == 1 and len(monomial) == 1 and monomial[0][1] == 1:
            symbol = monomial[0][0]
            return symbol if symbol[0] in ("var", "const") and symbol != ("const", "i") else None
    return None


def prime_powers(number: int, exponent: Fraction) -> Polynomial:
    """number ** exponent as powers of its primes; TooBig when a factor is beyond trial division."""
    monomial: Monomial = ()
    factor, divisor = Fraction(1), 2
    while number > 1:
        if divisor * divisor > number:
            divisor = number  # what is left is a prime
        elif divisor > MAX_DIVISOR:
            raise TooBig("a root of a number that is not factored by small primes")
        count = 0
        while number % divisor == 0:
            number //= divisor
            count += 1
        if count:
            monomial, more = joined(monomial, ((("prime", divisor), exponent * count),))
            factor *= more
        divisor += 1
    return {monomial: factor}


def counted(name: str, values: list[Fraction | None]) -> Fraction:
    """n! and n over k for small whole numbers."""
    if any(value is None or value.denominator != 1 or not 0 <= value <= 200 for value in values):
        raise TooBig(f"{name} of something that is not a small whole number")
    numbers = [int(value) for value in values]
    return Fraction(math.factorial(*numbers) if name == "factorial" else math.comb(*numbers))
