"""A source of problems that needs no download: arithmetic in rising levels, each with a worked solution.

Problem number `index` of a level is a function of (level, seed, split, index) alone. The split of a problem follows
from its numbers, not from its wording or its seed: 3 + 5 and 5 + 3, however asked, are both training problems or both
held out, so no seed ever shows a held-out problem to training. Word problems are in arithmetic_words.py.

    make_problem("two_digit_sums", seed=1, index=0, split="train")
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from alignment.arithmetic_words import word_problem
from alignment.problem import Draft, Problem, split_of
from configs.errors import UserError, check_choice

MAX_TRIES = 1000  # a draw falls into the wanted split with probability 0.2 or more
QUESTIONS = (
    "What is {}?",
    "Compute {}.",
    "Calculate {}.",
    "Find the value of {}.",
    "How much is {}?",
    "Work out {}.",
)


@dataclass(frozen=True)
class Level:
    """One kind of problem: `draw` makes one of it from a random generator."""

    name: str
    draw: Callable[[random.Random], Draft]


def ask(rng: random.Random, expression: str, key: str, steps: list[str], value: int) -> Draft:
    """A bare calculation in one of several wordings."""
    return Draft(rng.choice(QUESTIONS).format(expression), " ".join(steps), str(value), key)


def one_digit_sum(rng: random.Random) -> Draft:
    a, b = rng.randrange(10), rng.randrange(10)
    return ask(rng, f"{a} + {b}", sum_key(a, b), [f"{a} + {b} = {a + b}."], a + b)


def one_digit_chain(rng: random.Random) -> Draft:
    """Three or four one-digit addends, added from the left."""
    terms = [rng.randrange(10) for _ in range(rng.choice((3, 4)))]
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total} + {term} = {total + term}.")
        total += term
    return ask(rng, " + ".join(map(str, terms)), sum_key(*terms), steps, total)


def two_digit_sum(rng: random.Random) -> Draft:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return ask(rng, f"{a} + {b}", sum_key(a, b), add_by_places(a, b), a + b)


def mixed(rng: random.Random) -> Draft:
    """A difference, a product, or a product with a sum, in numbers up to 99."""
    kind = rng.choice(("minus", "times", "times_plus", "plus_times"))
    a, b, c = rng.randrange(2, 13), rng.randrange(2, 13), rng.randrange(2, 100)
    product = f"{a} * {b} = {a * b}."
    if kind == "minus":
        high, low = sorted((rng.randrange(10, 100), c), reverse=True)
        return ask(rng, f"{high} - {low}", f"minus {high} {low}", [f"{high} - {low} = {high - low}."], high - low)
    if kind == "times":
        return ask(rng, f"{a} * {b}", f"times {min(a, b)} {max(a, b)}", [product], a * b)
    total = a * b + c
    steps = [product, f"{a * b} + {c} = {total}."]
    if kind == "times_plus":
        return ask(rng, f"{a} * {b} + {c}", f"times_plus {min(a, b)} {max(a, b)} {c}", steps, total)
    steps = [f"{a} + {b} = {a + b}.", f"{a + b} * {c} = {(a + b) * c}."]
    return ask(rng, f"({a} + {b}) * {c}", f"plus_times {min(a, b)} {max(a, b)} {c}", steps, (a + b) * c)


def sum_key(*terms: int) -> str:
    return "plus " + " ".join(map(str, sorted(terms)))


def add_by_places(a: int, b: int) -> list[str]:
    """The written addition of two two-digit numbers: ones, carry, tens."""
    ones = a % 10 + b % 10
    tens, carry = a // 10 + b // 10, ones // 10
    steps = [f"Ones: {a % 10} + {b % 10} = {ones}."]
    if carry:
        steps.append(f"Tens: {a // 10} + {b // 10} + 1 = {tens + 1}.")
    else:
        steps.append(f"Tens: {a // 10} + {b // 10} = {tens}.")
    return [*steps, f"{a} + {b} = {a + b}."]


LEVELS = {
    level.name: level
    for level in (
        Level("one_digit_sums", one_digit_sum),
        Level("one_digit_chains", one_digit_chain),
        Level("two_digit_sums", two_digit_sum),
        Level("mixed", mixed),
        Level("word_problems", word_problem),
    )
}


def generator_of(*parts: object) -> random.Random:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "little"))


def make_problem(level: str, seed: int, index: int, split: str) -> Problem:
    """Problem `index` of a level; UserError for an unknown level or split (train, held_out or all)."""
    check_choice("level", level, tuple(LEVELS))
    check_choice("split", split, ("train", "held_out", "all"))
    if index < 0:
        raise UserError(f"index={index} must not be negative; use 0 or more")
    rng = generator_of("arithmetic", level, seed, split, index)
    for _ in range(MAX_TRIES):
        draft = LEVELS[level].draw(rng)
        if split in ("all", split_of(f"{level}/{draft.key}")):
            name = f"arithmetic/{level}/{split}/{seed}/{index}"
            return Problem(name, draft.question, draft.answer, f"arithmetic/{level}", draft.solution)
    raise AssertionError(f"{MAX_TRIES} draws of {level} without one of split {split}")
