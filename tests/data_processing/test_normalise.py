"""normalise against explicit cases, html.unescape and unicodedata, and as a fixed point on random text."""

import html
import time
import unicodedata
from html.entities import html5

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from data_processing.document import Document
from data_processing.normalise import Normalise, NormaliseConfig, clean_controls, normalise_text, unescape_html

DEFAULT = NormaliseConfig()
CASES = [
    ("caf&eacute; &amp; &#x4e2d;&#20013;", "café & 中中"),
    ("?a=1&copy=2&notit; &amp;lt; & AT&T;", "?a=1&copy=2&notit; &lt; & AT&T;"),
    ("&#0;&#xD800;x", "\ufffd\ufffdx"),
    ("ﬁne ① Ａ x²", "fine 1 A x2"),
    ("e\x00\u0301", "é"),
    ("a\r\nb\rc\x0bd\x0ce\x85f\u2028g\u2029h", "a\nb\nc\nd\ne\nf\ng\nh"),
    ("\ufeffzero\x00 be\x07ll so\xadft \x9bcsi", "zero bell soft csi"),
    ("👩\u200d👩\u200d👧 می\u200cخواهم", "👩\u200d👩\u200d👧 می\u200cخواهم"),
    ("\n\n    indented  twice \t \n\n\n\n\nend\xa0 \n\n", "    indented  twice\n\nend"),
    ("trail \nnext\t\nlast   ", "trail\nnext\nlast"),
    ("a\u3000b\u2003c", "a b c"),
    ("", ""),
    (" \n\t\n", ""),
]


@pytest.mark.parametrize(("raw", "expected"), CASES)
def test_normalise_explicit_cases(raw, expected):
    assert normalise_text(raw, DEFAULT) == expected


def test_unescape_matches_html_unescape_on_every_entity():
    for name in html5:
        if name.endswith(";"):
            assert unescape_html(f"x &{name} y") == html.unescape(f"x &{name} y"), name
    for code in [1, 65, 128, 0x80, 0x9F, 0xFFFD, 0x1F600, 0x10FFFF, 0x110000]:
        assert unescape_html(f"&#{code};&#x{code:x};") == html.unescape(f"&#{code};&#x{code:x};"), code


def test_controls_match_unicodedata_over_the_whole_plane():
    """Of all characters below U+10000 exactly the controls, soft hyphen, BOM and foreign line ends change."""
    line_ends, extra = "\r\x0b\x0c\x85\u2028\u2029", "\xad\ufeff"
    for code in range(0x10000):
        character = chr(code)
        if 0xD800 <= code < 0xE000:
            continue
        if character in line_ends:
            expected = "\n"
        elif character in extra or (unicodedata.category(character) == "Cc" and character not in "\t\n"):
            expected = ""
        else:
            expected = character
        assert clean_controls(f"a{character}b") == f"a{expected}b", hex(code)


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \t\n\r\x0c\xa0e\u0301\xad")))
)
def test_normalised_text_is_a_fixed_point_in_nfkc(text):
    config = NormaliseConfig(unescape_html=False)
    once = normalise_text(text, config)
    assert unicodedata.is_normalized("NFKC", once)
    assert normalise_text(once, config) == once
    assert not any(unicodedata.category(c) == "Cc" and c not in "\t\n" for c in once)
    assert "\n\n\n" not in once and not any(line.endswith((" ", "\t")) for line in once.split("\n"))
    separated = ["\n" if c in "\n\r\x0b\x0c\x85\u2028\u2029" else c for c in text]
    raw = "".join(c for c in separated if c in "\t\n" or not (unicodedata.category(c) == "Cc" or c in "\xad\ufeff"))
    assert "".join(once.split()) == "".join(unicodedata.normalize("NFKC", raw).split()), "no letter is lost or made"


def test_forms_and_collapse_by_config():
    assert normalise_text("ﬁ e\u0301", NormaliseConfig(unicode_form="NFC")) == "ﬁ é"
    assert normalise_text("ﬁ e\u0301", NormaliseConfig(unicode_form="none")) == "ﬁ e\u0301"
    assert normalise_text("&lt;", NormaliseConfig(unescape_html=False)) == "&lt;"
    assert normalise_text("  a \t b   c", NormaliseConfig(collapse_spaces=True)) == "  a b c"
    with pytest.raises(UserError, match=r"unicode_form='NFX' is unknown"):
        NormaliseConfig(unicode_form="NFX")


def test_the_stage_drops_what_is_empty_and_cleans_titles():
    block = [
        Document("1", "s", "a \n", title=" A&amp;B\n\x00 c "),
        Document("2", "s", "\x00 \n"),
        Document("3", "s", "b"),
    ]
    kept, dropped = Normalise(DEFAULT).run(block)
    assert [(d.id, d.text, d.title) for d in kept] == [("1", "a", "A&B c"), ("3", "b", "")]
    assert [(d.document.id, d.reason) for d in dropped] == [("2", "empty")]


@pytest.mark.parametrize(
    "piece", [" ", "\n", " \n", "\t \n", "&", "&#", "&amp", "\r\n", "\u0301", "e\u0301", "\xad", "\xa0"]
)
def test_no_input_of_a_megabyte_runs_away(piece):
    """A quadratic step would take minutes here; the bound is far above a linear one on a slow, busy machine."""
    started = time.process_time()
    normalise_text("x" + piece * (1_000_000 // len(piece)) + "x", NormaliseConfig(collapse_spaces=True))
    assert time.process_time() - started < 5
