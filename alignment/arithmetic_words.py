"""Word problems of two to four steps in plain English, with a worked solution of one calculation a step.

Each family draws its numbers first and its wording after; the key of a problem is the family with its numbers, so that
two wordings of one calculation stay on one side of a split. All amounts are whole, all divisions exact.
"""

import random

from alignment.problem import Draft

NAMES = "Ana Ben Carla Dev Emma Farid Grace Hugo Ines Jack Kira Leo Mina Nora Omar Pia Quinn Rosa Sam Tara".split()
ITEMS = "apples books cards coins cookies eggs flowers marbles pencils shells stamps stickers".split()
GOODS = (("notebook", "notebooks"), ("ticket", "tickets"), ("sandwich", "sandwiches"), ("plant", "plants"))
GROUPS = (("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("packet", "packets"))


class Story:
    """Sentences of the question and lines of the solution, with the amount that they lead to."""

    def __init__(self, family: str):
        self.question: list[str] = []
        self.solution: list[str] = []
        self.key = [family]
        self.amount = 0

    def tell(self, sentence: str, *numbers: int) -> None:
        self.question.append(sentence)
        self.key += map(str, numbers)

    def work(self, words: str, left: int, sign: str, right: int) -> int:
        """A line such as "Left: 12 - 5 = 7."; returns its value and keeps it as the amount."""
        values = {"+": left + right, "-": left - right, "*": left * right, "/": left // right if right else 0}
        assert sign != "/" or left % right == 0, f"{left} / {right} is not whole"
        self.amount = values[sign]
        self.solution.append(f"{words}: {left} {sign} {right} = {self.amount}.")
        return self.amount

    def draft(self) -> Draft:
        return Draft(" ".join(self.question), " ".join(self.solution), str(self.amount), " ".join(self.key))


def inventory(rng: random.Random) -> Draft:
    """Someone has things and gains, loses, doubles or packs them, two to four times."""
    name, friend = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    story = Story("inventory")
    have = rng.randrange(5, 60)
    story.tell(f"{name} has {have} {items}.", have)
    for _ in range(rng.randrange(2, 5)):
        have = inventory_event(rng, story, (name, friend, items), have)
    story.tell(f"How many {items} does {name} have now?")
    return story.draft()


def inventory_event(rng: random.Random, story: Story, words: tuple[str, str, str], have: int) -> int:
    name, friend, items = words
    kind = rng.choice(("find", "buy", "give", "lose", "double") if have < 100 else ("give", "lose", "share"))
    story.key.append(kind)
    if kind == "find":
        more = rng.randrange(2, 40)
        story.tell(f"{friend} gives {name} {more} more.", more)
        return story.work(f"With those of {friend}", have, "+", more)
    if kind == "buy":
        count, each = rng.randrange(2, 9), rng.randrange(2, 12)
        story.tell(f"{name} buys {count} packs of {each} {items} each.", count, each)
        return story.work("Then there are", have, "+", story.work("In the packs", count, "*", each))
    if kind == "double":
        story.tell(f"Then {name} gets as many again as there are.")
        return story.work("Twice as many", have, "*", 2)
    if kind == "share" and have % 2 == 0:
        story.tell(f"{name} gives half of the {items} to {friend}.")
        return story.work("Half of them", have, "/", 2)
    fewer = rng.randrange(1, max(2, have // 2))
    verb = "loses" if kind == "lose" else f"gives {friend}"
    story.tell(f"{name} {verb} {fewer} of them.", fewer)
    return story.work("What is left", have, "-", fewer)


def shopping(rng: random.Random) -> Draft:
    """Goods at a price each, a second purchase, and change or a total."""
    name = rng.choice(NAMES)
    (one, many), (other, others) = rng.sample(GOODS, 2)
    count, price = rng.randrange(2, 13), rng.randrange(2, 16)
    second, second_price = rng.randrange(2, 9), rng.randrange(2, 16)
    story = Story("shopping")
    story.tell(f"A {one} costs ${price} and a {other} costs ${second_price}.", price, second_price)
    story.tell(f"{name} buys {count} {many} and {second} {others}.", count, second)
    first = story.work(f"The {many} cost", count, "*", price)
    total = story.work("Together", first, "+", story.work(f"The {others} cost", second, "*", second_price))
    if rng.random() < 0.5:
        paid = (total // 50 + 1) * 50
        story.tell(f"{name} pays with ${paid}. How many dollars does {name} get back?", paid)
        story.work("Change", paid, "-", total)
    else:
        story.tell("How many dollars does that cost in all?")
    return story.draft()


def rate(rng: random.Random) -> Draft:
    """So much a day for some days, then another pace, and what is left of a goal."""
    name = rng.choice(NAMES)
    pages, days = rng.randrange(5, 40), rng.randrange(2, 10)
    more, more_days = rng.randrange(5, 40), rng.randrange(2, 8)
    goal = pages * days + more * more_days + rng.randrange(1, 150)
    story = Story("rate")
    story.tell(f"A book has {goal} pages.", goal)
    story.tell(f"{name} reads {pages} pages a day for {days} days,", pages, days)
    story.tell(f"then {more} pages a day for {more_days} days.", more, more_days)
    story.tell(f"How many pages does {name} still have to read?")
    first = story.work("First", pages, "*", days)
    both = story.work("In all", first, "+", story.work("Then", more, "*", more_days))
    story.work("Left", goal, "-", both)
    return story.draft()


def sharing(rng: random.Random) -> Draft:
    """Containers of equal content, some taken away, the rest shared equally."""
    items = rng.choice(ITEMS)
    one, many = rng.choice(GROUPS)
    children, each = rng.randrange(2, 11), rng.randrange(2, 16)
    groups, inside, taken = divisible_total(rng, children * each)
    story = Story("sharing")
    story.tell(f"There are {groups} {many} with {inside} {items} in each {one}.", groups, inside)
    total = story.work("In all", groups, "*", inside)
    if taken:
        story.tell(f"{taken} of the {items} are broken and thrown away.", taken)
        total = story.work("Good ones", total, "-", taken)
    story.tell(f"The rest are shared equally among {children} children.", children)
    story.tell(f"How many {items} does each child get?")
    story.work("Each child", total, "/", children)
    return story.draft()


def divisible_total(rng: random.Random, wanted: int) -> tuple[int, int, int]:
    """Numbers with groups * inside - taken == wanted, taken small."""
    groups = rng.randrange(2, 10)
    inside = -(-wanted // groups)
    return groups, inside, groups * inside - wanted


def comparison(rng: random.Random) -> Draft:
    """Three people, amounts told as more, fewer or times as many."""
    first, second, third = rng.sample(NAMES, 3)
    items = rng.choice(ITEMS)
    base, factor, less = rng.randrange(6, 40), rng.randrange(2, 6), rng.randrange(1, 6)
    story = Story("comparison")
    story.tell(f"{first} has {base} {items}. {second} has {factor} times as many as {first}.", base, factor)
    story.tell(f"{third} has {less} fewer than {second}.", less)
    story.tell("How many do the three have together?")
    double = story.work(second, base, "*", factor)
    third_has = story.work(third, double, "-", less)
    story.work("All three", story.work(f"{first} and {second}", base, "+", double), "+", third_has)
    return story.draft()


FAMILIES = (inventory, shopping, rate, sharing, comparison)


def word_problem(rng: random.Random) -> Draft:
    """One of the families above."""
    return rng.choice(FAMILIES)(rng)
