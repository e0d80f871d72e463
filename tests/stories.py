"""Small stories from a seeded grammar, for tests that need text with real statistical structure and no download.

A story keeps one hero, one place and one object from its first line to its last, verbs agree with their subject and
the moral depends on what happened: a model of a few thousand parameters gains at once from letters and words, and
goes on gaining from what it read earlier in the story. The same (count, seed) gives the same stories everywhere.
"""

import random

from data_processing.document import Document

HEROES = {
    "fox": ("Rusk", "clever"),
    "owl": ("Mirel", "old"),
    "hare": ("Tib", "quick"),
    "badger": ("Brock", "stubborn"),
    "robin": ("Pell", "small"),
    "otter": ("Sedge", "merry"),
}
PLACES = ["the mill", "the frozen lake", "the orchard", "the stone bridge", "the market", "the lighthouse"]
THINGS = ["lantern", "silver key", "loaf of bread", "blue kite", "wooden boat", "jar of honey"]
HELPERS = ["a baker", "a sailor", "two children", "a tired knight", "three sparrows", "an old clockmaker"]
WEATHERS = ["rain", "snow", "warm wind", "thick fog", "bright sun"]
ENDINGS = {
    True: ["So the {thing} came home, and everyone ate together.", "Since then nobody at {place} has been lonely."],
    False: ["So the {thing} was never seen again.", "Since then {name} has looked for it every evening."],
}


def make_stories(count: int, seed: int) -> list[Document]:
    """`count` stories as Documents (source "stories", 300 to 900 characters; one in some thousand repeats another)."""
    rng = random.Random(seed)
    return [make_story(rng, index) for index in range(count)]


def make_story(rng: random.Random, index: int) -> Document:
    animal = rng.choice(sorted(HEROES))
    name, trait = HEROES[animal]
    place, thing, found = rng.choice(PLACES), rng.choice(THINGS), rng.random() < 0.5
    days = rng.randint(2, 99)
    paragraphs = [
        f"Once upon a time a {trait} {animal} named {name} lived near {place}. {name} owned a {thing}"
        f" and kept it for {days} days.",
        *(_episode(rng, name, animal, place, thing) for _ in range(rng.randint(1, 3))),
        _ending(rng, name, place, thing, found),
    ]
    title = f"{name} and the {thing}"
    return Document(f"story-{index}", "stories", "\n\n".join([title, *paragraphs]) + "\n", title=title)


def _episode(rng: random.Random, name: str, animal: str, place: str, thing: str) -> str:
    helper, weather = rng.choice(HELPERS), rng.choice(WEATHERS)
    plural = helper.split()[0] in ("two", "three")
    verb, pronoun = ("were", "they") if plural else ("was", "he")
    question = rng.choice([f"Have you seen my {thing}?", f"Who took the {thing} from {place}?", f"Is that a {thing}?"])
    answer = rng.choice(["Yes, by the water.", "No, not since morning.", f"Ask the {animal}'s mother."])
    return (
        f"One day the {weather} came to {place}, and {helper} {verb} walking there."
        f' "{question}" asked {name} the {animal}. "{answer}" {pronoun} said.'
    )


def _ending(rng: random.Random, name: str, place: str, thing: str, found: bool) -> str:
    outcome = (
        f"In the evening {name} found the {thing} under {place}."
        if found
        else f"The {thing} was gone, and it was dark."
    )
    return f"{outcome} {rng.choice(ENDINGS[found]).format(thing=thing, place=place, name=name)}"
