"""mask_pii on the values of pii_values.py: more than 200 that are to be found, more than 60 that are not."""

import time

import pytest

from configs.errors import UserError
from data_processing.document import Document
from data_processing.mask_pii import FINDERS, MaskPii, MaskPiiConfig, mask_text
from data_processing.mask_pii_accounts import is_iban, passes_luhn
from tests.data_processing.pii_values import IN_CONTEXT, LOOK_ALIKES, POSITIVES
from tests.tolerances import PATHOLOGICAL_SECONDS, PII_RECALL

FRAMES = [
    "{}",
    "Write to {} today.",
    "({})",
    "my own: {}, or later",
    "\u00bb{}\u00ab and more text",
    "line one\n{}\nline three",
]


@pytest.mark.parametrize("kind", POSITIVES)
def test_recall_of_each_kind_in_several_surroundings(kind):
    """A value counts as found when it is masked whole and nothing else is, in every frame."""
    mask = f"|||{kind}|||"
    found = [all(mask_text(f.format(v)) == (f.format(mask), {kind: 1}) for f in FRAMES) for v in POSITIVES[kind]]
    missed = [value for value, whole in zip(POSITIVES[kind], found, strict=True) if not whole]
    assert len(missed) <= (1 - PII_RECALL) * len(found), missed


def test_the_lists_are_as_long_as_they_should_be():
    values = [value for kind in POSITIVES.values() for value in kind]
    assert len(set(values)) == len(values) >= 200 and len(set(LOOK_ALIKES)) >= 60
    assert [text for text in IN_CONTEXT if mask_text(text)[1] != {"PHONE_NUMBER": 1}] == []


def test_section_numbers_at_line_starts_are_no_addresses():
    assert mask_text("text\n9.4.2.1 Configuring the host\n9.4.2.2. More")[1] == {}
    assert mask_text("9.4.2.1 100 ms\n9.4.2.100:80 up")[1] == {"IP_ADDRESS": 2}


@pytest.mark.parametrize("text", LOOK_ALIKES)
@pytest.mark.parametrize("frame", ["{}", "see {} there", "\n{}\n"])
def test_look_alikes_stay(text, frame):
    assert mask_text(frame.format(text)) == (frame.format(text), {})


def test_placeholders_are_stable_and_counted():
    text = "Ann ann@x.org, 192.168.0.1; card 4111 1111 1111 1111, tel. +49 30 1234567, bob@x.org"
    masked = "Ann |||EMAIL_ADDRESS|||, |||IP_ADDRESS|||; card |||CREDIT_CARD|||, tel. |||PHONE_NUMBER|||, "
    masked += "|||EMAIL_ADDRESS|||"
    stage = MaskPii(MaskPiiConfig())
    document = Document("1", "s", text)
    assert stage.judge(document) == ("", "") and document.text == masked
    counts = {"EMAIL_ADDRESS": 2, "IP_ADDRESS": 1, "CREDIT_CARD": 1, "PHONE_NUMBER": 1}
    assert document.meta["pii"] == counts == stage.take_counts()
    assert mask_text(masked) == (masked, {}), "masking twice changes nothing"
    only = MaskPii(MaskPiiConfig(kinds=["IP_ADDRESS"]))
    document = Document("1", "s", text)
    only.judge(document)
    assert document.text == text.replace("192.168.0.1", "|||IP_ADDRESS|||")
    with pytest.raises(UserError, match=r"mask_pii\.kinds='NAME' is unknown"):
        MaskPiiConfig(kinds=["NAME"])


def test_named_keys_and_private_keys():
    text = 'api_key = "3f9a8b7c6d5e4f3a2b1c" and password: short'
    assert mask_text(text)[0] == 'api_key = "|||API_KEY|||" and password: short'
    pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"
    assert mask_text(f"a\n{pem}\nb")[0] == "a\n|||API_KEY|||\nb"


def test_checksums_by_hand():
    assert passes_luhn("79927398713") and not passes_luhn("79927398710")
    assert is_iban("GB82WEST12345698765432") and not is_iban("GB82WEST12345698765433")
    assert not is_iban("GB82WEST123456987654"), "the country's length"


PIECES = ["a@", "1", "1 ", "1.", ":", "@", "-", "sk-", "eyJ", "a.", "(", "tel ", "0-", "AB12", "a::", "key=", "+1 "]
PIECES += [
    "a" * 64 + "@" + "b." * 30,
    "eyJ" + "a" * 50 + ".",
    "DE89 ",
    "1:",
    "192.168.0.",
    "-----BEGIN PRIVATE KEY-----",
]
PIECES += ["4111 ", "xn--", "a@b.", "011 ", "secret_key=", "SG.", "::1 ", "(0", "01 42 ", "api_key: "]


@pytest.mark.parametrize("kind", FINDERS)
def test_no_expression_runs_away(kind):
    """A megabyte of what expressions like to begin with: 1.0 s of processor time at most as seen on a busy machine.

    Quadratic work on it would take minutes: a million characters are ten to the twelfth pairs.
    """
    for piece in PIECES:
        text = piece * (1_000_000 // len(piece))
        started = time.process_time()
        sum(1 for _ in FINDERS[kind](text))
        assert time.process_time() - started < PATHOLOGICAL_SECONDS, piece
