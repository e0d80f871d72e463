"""The web corpora's rules against plain versions of their definitions, and each rule on a text that breaks it."""

import random
import re
import time
from collections import Counter

import numpy as np
import pytest

from configs.errors import UserError
from data_processing.document import Document
from data_processing.quality_filter import QualityFilter, QualityFilterConfig
from data_processing.quality_filter_c4 import C4Config, clean_c4
from data_processing.quality_filter_gopher import GopherConfig, judge_gopher
from data_processing.quality_filter_repetition import RepetitionConfig as Repetition
from data_processing.quality_filter_repetition import (
    covered_characters,
    duplicate_gram_characters,
    judge_repetition,
    most_frequent,
    repeated,
    split_runs,
    top_gram_characters,
)
from data_processing.quality_filter_tokens import count_sentences, split_words
from data_processing.quality_filter_words import TextView, WordTable

SENTENCE = "The captain said that they have to be at the river with all of the letters before the evening. "
# Five lines of prose without a repeated n-gram to speak of, which every set of rules lets pass.
WORDS = [f"{a}{b}" for a in ("al", "be", "co", "du", "en", "fi", "go") for b in ("ra", "mint", "sel", "tor", "ving")]


def prose(seed: int = 0, lines: int = 6) -> str:
    rng = random.Random(seed)
    made = []
    for _ in range(lines):
        words = [rng.choice([*WORDS, "the", "of", "and", "to", "that", "with"]) for _ in range(24)]
        made.append("The " + " ".join(words) + ".")
    return "\n".join(made)


def random_text(rng: random.Random) -> str:
    """Few different words, so that n-grams repeat, over some lines and paragraphs."""
    words = [rng.choice(["a", "bb", "ccc", "dd,", "e."]) for _ in range(rng.randint(0, 60))]
    return "".join(word + rng.choice([" ", " ", " ", "\n", "\n\n"]) for word in words)


def view(text: str) -> TextView:
    return TextView(text, WordTable())


def plain_top(words: list[str], n: int) -> int:
    grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not grams:
        return 0
    gram, count = Counter(grams).most_common(1)[0]
    return len(gram) * count


def plain_duplicates(words: list[str], n: int) -> int:
    seen, characters, at = set(), 0, 0
    while at < len(words) - n + 1:
        gram = "".join(words[at : at + n])
        if tuple(words[at : at + n]) in seen:
            characters, at = characters + len(gram), at + n
        else:
            seen.add(tuple(words[at : at + n]))
            at += 1
    return characters


def test_ngram_rules_match_the_plain_definitions():
    rng, covered = random.Random(1), 0
    for _ in range(300):
        text = random_text(rng)
        words, one = split_words(text), view(text)
        assert one.words.size == len(words)
        for n in (2, 3, 4):
            assert top_gram_characters(one, n) == plain_top(words, n)
            if len(words) >= n:
                grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
                assert most_frequent(one.grams(n)) == max(grams.values())
        for n in (2, 3, 5):
            expected = plain_duplicates(words, n)
            assert duplicate_gram_characters(one, n) == expected <= covered_characters(one, n)
            covered += expected > 0
    assert covered > 100, "the case has repeats"


def plain_repetition(text: str, config: Repetition) -> str:
    """Gopher's verdict by the definitions alone, without the short cuts."""
    words, size = split_words(text), max(len(text), 1)
    for n, bound in zip((2, 3, 4), config.max_top_gram_shares, strict=True):
        if plain_top(words, n) / size > bound:
            return f"top_{n}_gram"
    for n, bound in zip(range(5, 11), config.max_duplicate_gram_shares, strict=True):
        if plain_duplicates(words, n) / size > bound:
            return f"duplicate_{n}_grams"
    return ""


def test_short_cuts_change_no_verdict():
    rng, reasons = random.Random(2), Counter()
    config = Repetition(0, 0, 0, 0)
    for _ in range(600):
        words = [rng.choice(WORDS) for _ in range(150)]
        for _ in range(rng.randint(0, 8)):
            at, back = rng.randint(10, 140), rng.randint(0, 9)
            words[at : at + rng.randint(2, 11)] = words[at - back - 1 : at]
        text = " ".join(words)
        reason = judge_repetition(view(text), config)[0]
        assert reason == plain_repetition(text, config)
        reasons[reason] += 1
    assert len(reasons) > 4, reasons


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "It's the U.S. captain's; don't go!",
            ["It", "'s", "the", "U.S.", "captain", "'s", ";", "do", "n't", "go", "!"],
        ),
        ("Mr. Smith paid $5.50 (10%).", ["Mr.", "Smith", "paid", "$", "5.50", "(", "10", "%", ")", "."]),
        ("well-known and/or http://x.org/a?b=1, ok", ["well", "-", "known", "and/or", "http://x.org/a?b=1", ",", "ok"]),
        ("wait... no\u2026 e.g. this", ["wait", "...", "no", "\u2026", "e.g.", "this"]),
        ("cannot we'd've", ["can", "not", "we", "'d", "'ve"]),
        ("", []),
        ("\u5929\u5730\u7384\u9ec4\u3002", ["\u5929\u5730\u7384\u9ec4", "\u3002"]),
    ],
)
def test_words_by_hand(text, words):
    assert split_words(text) == words


def test_a_word_table_begun_anew_gives_the_same_words(monkeypatch):
    monkeypatch.setattr("data_processing.quality_filter_words.MAX_CHUNKS", 20)
    table = WordTable()
    for seed in range(5):
        text = prose(seed)
        read = TextView(text, table)
        words = split_words(text)
        assert read.word_ends[-1] == sum(map(len, words))
        assert np.array_equal(table.real[read.words], [any(map(str.isalnum, word)) for word in words])


def test_sentences_by_hand():
    assert count_sentences("One. Two! Three? \u201cFour.\u201d Five") == 5
    assert count_sentences("Dr. No met Mr. Yes") == 1
    assert count_sentences("...") == 0 and count_sentences("") == 0


REPETITION = {
    "repeated_paragraphs": "\n\n".join(["A par."] * 3 + [prose()]),
    "repeated_paragraph_characters": "\n\n".join([SENTENCE, SENTENCE, *"abcdefgh", prose(lines=1)]),
    "repeated_lines": "\n".join(["ab", "cd"] * 6) + "\n" + prose(),
    "top_2_gram": " ".join(["alra bemint"] * 20 + WORDS),
    "duplicate_5_grams": " ".join(f"w{n}" for n in [*range(60), *range(20, 45)]),
}


@pytest.mark.parametrize("reason", REPETITION)
def test_each_repetition_rule(reason):
    assert judge_repetition(view(REPETITION[reason]), Repetition())[0] == reason
    assert judge_repetition(view(prose()), Repetition()) == ("", "")
    off = Repetition(0, 0, 0, 0, [0, 0, 0], [0, 0, 0, 0, 0, 0])
    assert judge_repetition(view(REPETITION[reason]), off) == ("", "")


GOPHER = {
    "few_words": ("Too few words.", {}),
    "many_words": (prose(), {"max_words": 20}),
    "short_words": ("a b c d e f the of " * 20, {}),
    "long_words": ("incomprehensibilities the counterrevolutionaries of " * 20, {}),
    "many_hashes": ("# " * 40 + prose(), {}),
    "many_ellipses": (prose().replace(" the ", " the ... ") + " ... " * 30, {}),
    "bullet_lines": ("\n".join("- " + line for line in prose(lines=20).split("\n")), {}),
    "ellipsis_lines": (prose().replace(".\n", "...\n"), {}),
    "few_alphabetic_words": (prose() + " 1234 5678" * 40, {}),
    "few_stop_words": (" ".join(WORDS * 3), {}),
}


@pytest.mark.parametrize("reason", GOPHER)
def test_each_gopher_rule(reason):
    text, settings = GOPHER[reason]
    found, detail = judge_gopher(view(text), GopherConfig(**settings))
    assert found == reason and detail
    assert judge_gopher(view(prose()), GopherConfig()) == ("", "")


def test_c4_takes_lines_out_and_drops_pages():
    extra = [
        "Menu",
        "Click here",
        "This line has no end mark",
        "We use cookies on this page.",
        "Please turn on JavaScript.",
    ]
    lines = prose().split("\n")
    text = "\n".join([*extra, *lines, "It rained[3] a lot here.", "Yes.", "And so on..."])
    cleaned, reason, _ = clean_c4(text, C4Config())
    assert not reason and cleaned == "\n".join([*lines, "It rained a lot here."])
    assert clean_c4(prose(lines=4), C4Config())[1] == "few_sentences"
    assert clean_c4(prose() + "\nA { in a line of code here.", C4Config())[1] == "curly_bracket"
    assert clean_c4(prose() + "\nLorem ipsum dolor sit amet.", C4Config())[1] == "lorem_ipsum"
    assert clean_c4(text, C4Config(0, 0, 0, False, False, False, False, False, False))[0] == text
    long = prose() + "\nA long " + "x" * 1001 + " word."
    assert clean_c4(long, C4Config())[0] == prose()


FINEWEB = {
    "few_end_marks": prose().replace(".\n", "\n").rstrip("."),
    "short_lines": "\n".join(["A short line."] * 1 + [f"Line number {n} here." for n in range(9)] + [prose(lines=2)]),
    "repeated_characters": prose() + "\n" + prose(lines=1),
    "list_like": "\n".join(f"Incomprehensibilitiesandcounterrevolutionaries{n}." for n in range(9)),
}


@pytest.mark.parametrize("reason", FINEWEB)
def test_each_fineweb_rule(reason):
    stage = QualityFilter(QualityFilterConfig(rules=["fineweb"]))
    assert stage.judge(Document("1", "s", FINEWEB[reason]))[0] == reason
    assert stage.judge(Document("1", "s", prose())) == ("", "")


def test_all_sets_in_their_order_and_the_count_of_what_c4_took():
    stage = QualityFilter(QualityFilterConfig(rules=["fineweb", "c4", "gopher", "repetition", "characters"]))
    assert stage.rules == ["characters", "repetition", "gopher", "c4", "fineweb"]
    document = Document("1", "s", prose() + "\nNo end mark here at all")
    assert stage.judge(document) == ("", "") and document.text == prose()
    assert (
        stage.take_counts() == {"c4_characters_removed": len("\nNo end mark here at all")} and not stage.take_counts()
    )
    assert stage.judge(Document("2", "s", ""))[0] == "too_short"
    with pytest.raises(UserError, match=r"quality_filter\.rules='gophers' is unknown"):
        QualityFilterConfig(rules=["gophers"])


@pytest.mark.parametrize(
    "kind", ["words", "one_line", "quotes", "dots", "cjk", "arabic", "emoji", "newlines", "dashes"]
)
def test_a_pathological_megabyte_takes_little_time(kind):
    texts = {
        "words": "ab cd " * 170_000,
        "one_line": "x" * 1_000_000,
        "quotes": "\"'" * 500_000,
        "dots": ". " * 500_000,
        "cjk": "\u5929\u5730\u7384\u9ec4" * 250_000,
        "arabic": "\u0643\u0644 \u0634\u064a\u0621 " * 110_000,
        "emoji": "\U0001f600\u200d" * 250_000,
        "newlines": "\n" * 1_000_000,
        "dashes": "a-" * 500_000,
    }
    stage = QualityFilter(QualityFilterConfig(rules=["characters", "repetition", "gopher", "c4", "fineweb"]))
    started = time.process_time()
    reason, _ = stage.judge(Document("1", "s", texts[kind]))
    assert reason and time.process_time() - started < 10


def test_split_runs_match_the_regular_expressions():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choice("a\n\n") for _ in range(rng.randint(0, 14)))
        assert split_runs(text, 1) == re.split(r"\n+", text)
        assert split_runs(text, 2) == re.split(r"\n{2,}", text)


def test_repeated_by_hand():
    assert repeated(["a", "bb", "a", "bb", "bb"]) == (3, 5)
    assert re.fullmatch(r"\w+", judge_gopher(view(""), GopherConfig())[0])
