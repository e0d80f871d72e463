"""quality_filter: the counting against a plain loop, and each rule on a text that breaks it and one that does not."""

import base64
import random
import unicodedata
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from data_processing.document import Document
from data_processing.quality_filter import (
    PUNCTUATION,
    QualityFilter,
    QualityFilterConfig,
    character_shares,
    repeated_line_share,
    run_share,
)
from tests.stories import make_stories

PROSE = make_stories(1, seed=3)[0].text
HINDI = "यह एक सामान्य वाक्य है जिसमें शब्दों के ऊपर मात्राएँ लगती हैं। " * 4
CHINESE = "天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏閏餘成歲律呂調陽雲騰致雨露結為霜" * 8
NOISE = base64.b64encode(random.Random(0).randbytes(600)).decode()
OFF = {
    "min_characters": 0,
    "min_letter_share": 0.0,
    "max_symbol_share": 0.0,
    "max_one_character_share": 0.0,
    "max_repeated_line_share": 0.0,
    "max_run_share": 0.0,
}
BREAKS = {
    "too_short": ("Too short.", {"min_characters": 100}),
    "too_long": (PROSE * 3, {"max_characters": 1000}),
    "few_letters": ("1234 5678 90 " * 20, {"min_letter_share": 0.5}),
    "many_symbols": ("a+b=c {x|y} <z> " * 20, {"max_symbol_share": 0.25}),
    "one_character": (PROSE + "a" * 2 * len(PROSE), {"max_one_character_share": 0.35}),
    "repeated_lines": ("Read more about it here\n" * 9 + PROSE[:100], {"max_repeated_line_share": 0.3}),
    "long_runs": (PROSE + NOISE, {"max_run_share": 0.3}),
}


def reason(text: str, **settings) -> str:
    return QualityFilter(QualityFilterConfig(**settings)).judge(Document("1", "s", text))[0]


@pytest.mark.parametrize("rule", BREAKS)
def test_each_rule_drops_its_own_case_and_only_when_on(rule):
    text, on = BREAKS[rule]
    assert reason(text, **(OFF | on)) == rule
    assert reason(text, **OFF) == "", "with its bound at 0 the rule is off"
    assert reason(PROSE, **(OFF | on)) == ("" if rule != "too_long" or len(PROSE) <= 1000 else rule)


@pytest.mark.parametrize(
    "text", [PROSE, HINDI, CHINESE, PROSE.upper()], ids=["english", "hindi", "chinese", "capitals"]
)
def test_ordinary_text_of_any_script_passes_the_defaults(text):
    assert reason(text) == ""


def test_the_detail_holds_value_and_bound():
    stage = QualityFilter(QualityFilterConfig(min_characters=11))
    assert stage.judge(Document("1", "s", "ten chars."))[1] == "10 characters < min_characters=11"


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab1 \n.#é"))))
def test_character_shares_match_a_plain_loop(text):
    visible = [c for c in text if not c.isspace()]
    total = max(len(visible), 1)
    kinds = [unicodedata.category(c)[0] for c in visible]
    symbols = sum(k not in "LMN" and c not in PUNCTUATION for c, k in zip(visible, kinds, strict=True))
    shares = character_shares(text)
    assert shares.letters == sum(k in "LM" for k in kinds) / total
    assert shares.symbols == symbols / total
    assert shares.most_frequent == max(Counter(visible).values(), default=0) / total


def test_shares_of_a_text_longer_than_one_slice():
    shares = character_shares("ab. " * 700_000 + "é" * 700_000)
    assert (shares.letters, shares.symbols, shares.most_frequent) == (3 / 4, 0.0, 1 / 4)


def test_line_and_run_shares_by_hand():
    assert repeated_line_share("ab\ncd\n ab \nab") == 4 / 8
    assert repeated_line_share("") == 0 and run_share("") == 0
    assert run_share("x" * 200) == 1 and run_share("x" * 199) == 0
    assert run_share("x" * 199 + " " + "y" * 300) == 300 / 500
    assert run_share("é" + "~" * 250 + "字" * 249) == 250 / 500, "other scripts have no spaces and are no runs"


@pytest.mark.parametrize("bad", [{"min_characters": -1}, {"min_letter_share": 1.5}, {"max_run_share": -0.1}])
def test_bounds_out_of_range_are_refused(bad):
    with pytest.raises(UserError, match=f"quality_filter.{next(iter(bad))}=.* is out of range"):
        QualityFilterConfig(**bad)
