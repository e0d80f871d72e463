"""Exact arithmetic on expressions against 40-digit values at points: two ways that share nothing but the tree."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.drgrpo_grader_algebra import (
    MAX_TERMS,
    Expansion,
    TooBig,
    Undefined,
    equal_exactly,
    prime_powers,
    proportional,
)
from alignment.drgrpo_grader_latex import parse_expression
from alignment.drgrpo_grader_numeric import equal_numerically
from alignment.drgrpo_grader_work import Work

LEAVES = st.one_of(
    st.integers(-4, 12).map(lambda n: ("num", Fraction(n))),
    st.sampled_from([("var", "x"), ("var", "y"), ("const", "i"), ("const", "pi")]),
)
EXPONENTS = st.sampled_from(["-2", "-1", "0", "1", "2", "3", "1/2", "-1/2", "3/2", "1/3", "1/4"])


def grown(inner):
    pairs = st.tuples(st.sampled_from(["add", "mul", "div"]), inner, inner)
    powers = st.tuples(st.just("pow"), inner, EXPONENTS.map(lambda text: ("num", Fraction(text))))
    return st.one_of(pairs, powers, st.tuples(st.just("neg"), inner))


TREES = st.recursive(LEAVES, grown, max_leaves=6)


def rewritten(tree, draw):
    """The same value in another shape."""
    if tree[0] in ("num", "var", "const"):
        six = ("num", Fraction(6))
        forms = [tree, ("neg", ("neg", tree)), ("div", ("mul", six, tree), six), ("add", tree, ("num", Fraction(0)))]
        return draw(st.sampled_from(forms))
    parts = [rewritten(part, draw) if isinstance(part, tuple) else part for part in tree[1:]]
    if tree[0] in ("add", "mul") and draw(st.booleans()):
        parts.reverse()
    if tree[0] == "mul" and parts[1][0] == "add" and draw(st.booleans()):
        return ("add", ("mul", parts[0], parts[1][1]), ("mul", parts[0], parts[1][2]))
    return (tree[0], *parts)


def exact_verdict(left, right):
    try:
        return equal_exactly(left, right, Work())
    except (TooBig, Undefined):
        return None


@settings(max_examples=150, deadline=None)
@given(st.data(), TREES, TREES)
def test_exact_and_numeric_verdicts_never_contradict(data, tree, other):
    for right in (other, rewritten(tree, data.draw)):
        exact, numeric = exact_verdict(tree, right), equal_numerically(tree, right)
        assert None in (exact, numeric) or exact == numeric


@settings(max_examples=100, deadline=None)
@given(st.data(), st.recursive(LEAVES, grown, max_leaves=4))
def test_another_shape_is_never_found_different(data, tree):
    assert exact_verdict(tree, rewritten(tree, data.draw)) is not False


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("\\sqrt{2}\\sqrt{6}", "2\\sqrt{3}", True),
        ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5}", False),
        ("(\\sqrt{2}+\\sqrt{3})^2", "5+2\\sqrt{6}", True),
        ("\\frac{1}{\\sqrt{5}-2}", "\\sqrt{5}+2", True),
        ("2^{1/2}2^{1/3}", "2^{5/6}", True),
        ("\\sqrt[4]{4}", "\\sqrt{2}", True),
        ("\\frac{x^3-1}{x-1}", "x^2+x+1", True),
        ("(1+i)^8", "16", True),
        ("\\frac{1}{i}", "-i", True),
        ("\\pi^2", "\\pi", False),
        ("\\sin(x)", "\\sin(x)", True),
        ("\\sin(x)", "\\sin(y)", None),
    ],
)
def test_known_identities(left, right, same):
    assert equal_exactly(parse_expression(left), parse_expression(right), Work()) is same


def test_proportional_differences_are_one_equation():
    assert proportional(parse_expression("2x+2y-4"), parse_expression("x+y-2"), Work())
    assert not proportional(parse_expression("2x+2y-4"), parse_expression("x+y-4"), Work())
    assert not proportional(parse_expression("0"), parse_expression("x"), Work())


def test_limits_stop_the_work_before_it_is_done():
    for text in ("(x+y+z)^{60}", "2^{2^{2^{2^{2^{2}}}}}", "\\sqrt{1000003\\cdot 1000033}", "200!\\cdot 201!"):
        with pytest.raises(TooBig):
            Expansion(Work()).quotient(parse_expression(text))
    assert len(Expansion(Work()).quotient(parse_expression("(x+y)^{20}"))[0]) == 21 <= MAX_TERMS


def test_prime_powers():
    assert prime_powers(72, Fraction(1, 2)) == {((("prime", 2), Fraction(1, 2)),): Fraction(6)}
    assert prime_powers(1, Fraction(1, 3)) == {(): Fraction(1)}


def test_division_by_zero_is_named():
    for text in ("1/0", "1/(x-x)", "0^{-1}", "\\frac{1}{\\sqrt{2}\\sqrt{2}-2}"):
        with pytest.raises(Undefined):
            Expansion(Work()).quotient(parse_expression(text))
