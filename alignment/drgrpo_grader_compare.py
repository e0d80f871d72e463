"""Whether two answers are the same: numbers exactly, then structure, units, expressions, text.

Every stage is bounded and none raises on any text. The verdict is True, False, or None when only a computer algebra
system could tell (drgrpo_grader_worker.py asks one in a process that is killed when it takes too long). The policies
behind the choices are written in docs/grading.md.
"""

import re

from alignment.drgrpo_grader_algebra import TooBig, Undefined, equal_exactly, proportional
from alignment.drgrpo_grader_latex import NotParsed, Tree, parse_expression
from alignment.drgrpo_grader_numeric import equal_numerically, variables
from alignment.drgrpo_grader_rational import Rational, parse_rational
from alignment.drgrpo_grader_structure import NAME, Structure, parse_structure
from alignment.drgrpo_grader_text import MAX_ANSWER_CHARS, clean, words_of
from alignment.drgrpo_grader_units import split_unit, units_conflict
from alignment.drgrpo_grader_work import NUMERIC_COST, TooMuchWork, Work

MAX_DEPTH = 4  # of lists within tuples within unions
CHOICE = re.compile(r"\(?([A-Ja-j])\)?[.:)]?")
CHOICE_WITH_TEXT = re.compile(r"(?:\(([A-J])\)|([A-J])[.):])\s.*", re.DOTALL)
FUNCTION_SIDE = re.compile(r"[A-Za-z]\s?\(\s?[A-Za-z](?:\s?,\s?[A-Za-z])*\s?\)")
NOT_A_NUMBER = {"nan", "inf", "none", "null", "undefined", "notanumber"}


def same_answer(given: str, truth: str) -> bool | None:
    """Whether a model's answer is the true one; None when undecided here."""
    if len(given) > MAX_ANSWER_CHARS or len(truth) > MAX_ANSWER_CHARS:
        return given.strip() == truth.strip()
    given, truth = exact_side(clean(given)), exact_side(clean(truth))
    if not given or not truth:
        return False
    try:
        return compare(given, truth, Work(), 0)
    except TooMuchWork:
        return False


def exact_side(text: str) -> str:
    """Of "a = exact \\approx rounded" what is exact; of "x \\approx 3.1" the number, for want of another."""
    left, sign, right = text.partition("\\approx")
    if not sign or not left.strip() or not right.strip():
        return text
    return right.strip() if is_name(left.strip()) else left.strip()


def compare(given: str, truth: str, work: Work, depth: int) -> bool | None:
    """The same of cleaned texts, within a structure `depth` levels deep; TooMuchWork when `work` is used up."""
    work.spend(1)
    number, true_number = parse_rational(given), parse_rational(truth)
    if number is not None and true_number is not None:
        return same_number(number, true_number)
    if words_of(given) == words_of(truth):
        return words_of(given) not in NOT_A_NUMBER or words_of(truth) in ("undefined", "none")
    if depth < MAX_DEPTH:
        ours, theirs = parse_structure(given), parse_structure(truth)
        if not ours.kind == theirs.kind == "single":
            return compare_structures(ours, theirs, work, depth + 1)
        given, truth = ours.items[0], theirs.items[0]
        if words_of(given) == words_of(truth):
            return True
    return compare_values(given, truth, work)


def same_number(given: Rational, truth: Rational) -> bool:
    """Exact equality; a percent sign on one side alone may be a unit (50% = 50) or a factor (50% = 0.5)."""
    if given.money and truth.money and given.money != truth.money:
        return False
    if given.percent == truth.percent:
        return given.value == truth.value
    percent, plain = (given, truth) if given.percent else (truth, given)
    return plain.value in (percent.value, percent.value / 100)


def compare_structures(given: Structure, truth: Structure, work: Work, depth: int) -> bool | None:
    if given.kind == "relation" or truth.kind == "relation":
        return compare_relations(given, truth, work, depth)
    if given.kind == truth.kind:
        if given.mark != truth.mark or len(given.items) != len(truth.items):
            return False
        in_order = given.kind in ("tuple", "matrix", "single")
        return (compare_in_order if in_order else compare_in_any_order)(given.items, truth.items, work, depth)
    kinds = {given.kind, truth.kind}
    if kinds == {"list", "single"}:
        return compare_repeated(given.items, truth.items, work, depth)
    if len(given.items) != len(truth.items):
        return False
    if kinds in ({"list", "set"}, {"list", "union"}):
        return compare_in_any_order(given.items, truth.items, work, depth)
    if kinds == {"list", "tuple"} and "()" in (given.mark, truth.mark):
        return compare_in_order(given.items, truth.items, work, depth)  # brackets left out
    if kinds == {"set", "single"}:
        return compare_in_order(given.items, truth.items, work, depth)  # {5} is 5
    return False


def compare_in_order(given: tuple[str, ...], truth: tuple[str, ...], work: Work, depth: int) -> bool | None:
    verdicts = [compare(a, b, work, depth) for a, b in zip(given, truth, strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def compare_repeated(given: tuple[str, ...], truth: tuple[str, ...], work: Work, depth: int) -> bool | None:
    """A list against one value: only when all its items are that value, "5/2 or 2.5", is it no hedge."""
    verdicts = [compare(a, b, work, depth) for a in given for b in truth]
    return False if False in verdicts else None if None in verdicts else True


def compare_in_any_order(given: tuple[str, ...], truth: tuple[str, ...], work: Work, depth: int) -> bool | None:
    """Match every true item with a given one of its own."""
    left, undecided = list(given), False
    for wanted in truth:
        verdicts = [compare(one, wanted, work, depth) for one in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else True


def compare_relations(given: Structure, truth: Structure, work: Work, depth: int) -> bool | None:
    """Equations and inequalities; against a plain value, what stands right of the last equals sign counts."""
    if given.kind == truth.kind:
        same = given.mark == truth.mark and len(given.items) == len(truth.items)
        if same and compare_in_order(given.items, truth.items, work, depth):
            return True
        if same and given.mark == "=":
            if compare_in_order(given.items[::-1], truth.items, work, depth):
                return True
            return same_equation(given.items, truth.items, work)
        return False
    relation, other = (given, truth) if given.kind == "relation" else (truth, given)
    if set(relation.mark.split()) != {"="}:
        return False
    if relation is truth and not is_name(truth.items[0]):
        return False  # the true answer is an equation, not a value
    if relation is given and not all(may_name_value(side) for side in given.items[:-1]):
        return False  # "2x = 72" does not say that the answer is 72
    value = relation.items[-1]
    if other.kind != "single":
        inner = parse_structure(value)
        pair = (inner, other) if relation is given else (other, inner)
        return False if inner.kind == "relation" else compare_structures(*pair, work, depth)
    return (
        compare(value, other.items[0], work, depth)
        if relation is given
        else compare(other.items[0], value, work, depth)
    )


def may_name_value(side: str) -> bool:
    """Whether the left of "side = value" is a name, words or a calculation, and not an expression in a variable."""
    tree = parsed(side)
    return is_name(side) or tree is None or not variables(tree)


def is_name(text: str) -> bool:
    return bool(NAME.fullmatch(text) or FUNCTION_SIDE.fullmatch(text))


def same_equation(given: tuple[str, ...], truth: tuple[str, ...], work: Work) -> bool | None:
    """Whether the two differences of sides are the same up to a constant factor: 2x = 4 - 2y is x + y = 2."""
    trees = [parsed(side) for side in (*given, *truth)]
    if None in trees:
        return False
    a, b, c, d = trees
    try:
        return proportional(("add", a, ("neg", b)), ("add", c, ("neg", d)), work)
    except (TooBig, Undefined):
        return False


def compare_values(given: str, truth: str, work: Work) -> bool | None:
    """One value against another: a number with its unit, an expression, a choice, or words."""
    value, unit = split_unit(given)
    true_value, true_unit = split_unit(truth)
    if (value, true_value) != (given, truth) and not units_conflict(unit, true_unit):
        number, true_number = parse_rational(value), parse_rational(true_value)
        if number is not None and true_number is not None:
            conflict = units_conflict(unit or number.money, true_unit or true_number.money)
            return same_number(number, true_number) and not conflict
    elif unit and true_unit:
        return False  # both are known and differ
    choice = same_choice(given, truth)
    if choice is not None:
        return choice
    verdict = compare_expressions(given, truth, work)
    if verdict is not True and (unit or true_unit):
        without_units = compare_expressions(value, true_value, work)
        return without_units if without_units is not False else verdict
    return verdict


def compare_expressions(given: str, truth: str, work: Work) -> bool | None:
    left, right = parsed(given), parsed(truth)
    if (left is None) != (right is None):  # beside an expression, "xy" is a product and no word
        left, right = left or parsed(given, letters=True), right or parsed(truth, letters=True)
    if left is None or right is None:
        unread = [text for tree, text in ((left, given), (right, truth)) if tree is None]
        return None if all("\\" in text for text in unread) else False  # words are not equal, LaTeX may be
    return same_tree(left, right, work)


def same_tree(left: Tree, right: Tree, work: Work) -> bool | None:
    """Exactly where possible, else at points."""
    if left == right:
        return True
    if any(is_infinite(tree) for tree in (left, right)):
        return is_infinite(left) and is_infinite(right) and sign_of(left) == sign_of(right)
    try:
        verdict = equal_exactly(left, right, work)
    except Undefined:
        return False  # 1/0 is no answer, not even to itself in another spelling
    except TooBig:
        work.spend(NUMERIC_COST)
        return equal_numerically(left, right) or False  # a tower of powers goes to no computer algebra system
    if verdict is None:
        work.spend(NUMERIC_COST)
        verdict = equal_numerically(left, right)
    return verdict


def is_infinite(tree: Tree) -> bool:
    return (tree[1] if tree[0] == "neg" else tree) == ("const", "inf")


def sign_of(tree: Tree) -> int:
    return -1 if tree[0] == "neg" else 1


def parsed(text: str, letters: bool = False) -> Tree | None:
    try:
        return parse_expression(text, letters)
    except NotParsed:
        return None


def same_choice(given: str, truth: str) -> bool | None:
    """Letters of a multiple choice, "(A)", "A." or "A) because"; None when the truth is no such letter."""
    wanted = CHOICE.fullmatch(truth)
    if wanted is None:
        return None
    match = CHOICE.fullmatch(given) or CHOICE_WITH_TEXT.fullmatch(given)
    if match is None:
        return None
    letter = next(group for group in match.groups() if group)
    both_upper = letter.isupper() and wanted[1].isupper()
    return letter == wanted[1] or (not both_upper and letter.upper() == wanted[1].upper() and letter.upper() in "ABCD")
