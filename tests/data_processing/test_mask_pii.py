"""mask_pii on numbers and addresses of our own making: 200 and more that are to be found, 60 and more that are not."""

import random
import time

import pytest

from configs.errors import UserError
from data_processing.document import Document
from data_processing.mask_pii import FINDERS, MaskPii, MaskPiiConfig, mask_text
from data_processing.mask_pii_accounts import is_iban, passes_luhn
from tests.tolerances import PII_RECALL

EMAILS = """a@b.co joe.bloggs+tag@mail.example.com 用户@例子.广告 jürgen@müller.de x_y@ex-ample.org иван@пример.рф
o'neil@foo.ie first.last@sub.domain.example.museum 1234@numbers.net δοκιμή@παράδειγμα.ελ user%x@host.example
very-long-local-part-0123456789@example.info UPPER@EXAMPLE.COM a.b.c.d@e.f.g.org test@xn--bcher-kva.xn--p1ai""".split()
IPS = """192.168.0.1 8.8.8.8 255.255.255.255 10.0.0.7 2001:db8::1 ::1 fe80::1ff:fe23:4567:890a
2001:0db8:85a3:0000:0000:8a2e:0370:7334 ::ffff:192.0.2.128 2001:db8:1:2:3:4:5:6 64:ff9b::192.0.2.33
2607:f0d0:1002:51::4""".split()
PHONES = """+49 30 1234567|(212) 555-0123|212-555-0123|212.555.0123|1-800-555-0199|020 7946 0958|07700 900123
01 42 68 53 00|01.42.68.53.00|030/1234567|0170-1234567|03-1234-5678|090-1234-5678|138 1234 5678|98765 43210
(02) 9876 5432|0412 345 678|(11) 91234-5678|8 (495) 123-45-67|+1 (415) 555-2671|+44 (0)20 7946 0958
0044 20 7946 0958|+86 138 1234 5678|+33 1 42 68 53 00|06 1234 5678|044 123 45 67|08-123 456 78|(030) 1234567
+4915112345678|089 / 123 45 67|+55 11 91234-5678|612 34 56 78|415-555-2671|+81-3-1234-5678|+91 98765 43210
0161 496 0999|+39 06 698 12345|+7 495 123-45-67|02-1234-5678|+61 2 9876 5432|(650) 555 0100|+27 11 123 4567""".replace(
    "\n", "|"
).split("|")
IN_CONTEXT = (
    "Tel.: 912 345 678|phone: 555-0123|call 5550123 today|Fax 12 34 56 78|mobile 20123456|Telefon 4567890".split("|")
)
IBANS = """DE89 3704 0044 0532 0130 00|GB82WEST12345698765432|FR14 2004 1010 0505 0001 3M02 606
NL91ABNA0417164300|CH93 0076 2011 6238 5295 7|ES91 2100 0418 4502 0005 1332|IT60 X054 2811 1010 0000 0123 456
AT611904300234573201""".replace("\n", "|").split("|")
KEYS = [
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "sk-abcdEFGH1234ijklMNOP5678",
    "xoxb-123456789012-abcdefABCDEF",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz12345678",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
]
FRAMES = [
    "{}",
    "Write to {} today.",
    "({})",
    "my own: {}, or later",
    "\u00bb{}\u00ab and more text",
    "line one\n{}\nline three",
]
LOOK_ALIKES = """version 1.2.3.4|v1.2.3.4|256.1.1.1|1.2.3.4.5|2024-01-15|15.01.2024|01/02/2024|978-3-16-148410-0
ISBN 0-306-40615-2|1.5, 2.5, 3.5|0.123 0.456 0.789|1 2 3 4 5 6 7 8 9 10|1990-2000|10 000 000|12:34:56|std::vector<int>
ab::cd|@media screen|pkg@1.2.3|p@ssw0rd|3 @ 4.50|1234567890123456|4111 1111 1111 1112|3.14159265358979|1,234,567,890
2021-03-04 12:30:00|20240115123045|RFC 2616|Section 4.2.1.3|00:1A:2B:3C:4D:5E|1.0.0-beta.2|10.5 - 12.5|100 200 300 400
1914-1918|Order no. 12345678|chr1:1000-2000|$1,000,000|5 000 000 000|2001:2002|a::b|01 02 03 04 05|10-20-30|1/2/3/4
192.168.1|0x1234abcd|DE00 1234|Windows 10.0.19041.1|4.4.0-116-generic|12 345 678|ISSN 1234-5678|doi:10.1000/182
1000000000|2^31 = 2147483648|9.81 m/s|17 18 19 20 21|release 5.10.0.1|1.000.000,00|123-45|2020/2021|5551234
1.1.1970 00:00:00|DE89 3704 0044 0532 0130 01|ISBN-13: 978-0-306-40615-7|04/07/1976|2024.05.06|300.1.2.3|1.01.2.3
§ 4.2.1.1|user@localhost|decorator @functools|a@b|12.5.2023 - 13.5.2023|0.5 0.25 0.125
sk-learn and sk-image|the key: value pairs|999-99-9999999|page 12 of 340""".replace("\n", "|").split("|")


def cards() -> list[str]:
    """Numbers with a right check digit, in the issuers' groupings."""
    rng, made = random.Random(5), ["378282246310005", "3782 822463 10005", "6011111111111117"]
    for prefix in ("4", "51", "55", "2221", "62", "35"):
        for join in ("", " ", "-"):
            digits = prefix + "".join(str(rng.randint(0, 9)) for _ in range(15 - len(prefix)))
            digits += next(d for d in "0123456789" if passes_luhn(digits + d))
            made.append(join.join(digits[i : i + 4] for i in range(0, 16, 4)))
    return made


POSITIVES = {
    "EMAIL_ADDRESS": EMAILS,
    "IP_ADDRESS": IPS,
    "PHONE_NUMBER": PHONES,
    "IBAN": IBANS,
    "CREDIT_CARD": cards(),
    "API_KEY": KEYS,
}


@pytest.mark.parametrize("kind", POSITIVES)
def test_recall_of_each_kind_in_several_surroundings(kind):
    cases = [(frame, value) for value in POSITIVES[kind] for frame in FRAMES]
    missed = [case for case in cases if mask_text(case[0].format(case[1]))[1] != {kind: 1}]
    assert len(missed) <= (1 - PII_RECALL) * len(cases), missed


def test_the_lists_are_as_long_as_they_should_be():
    assert sum(map(len, POSITIVES.values())) * len(FRAMES) > 200 and len(LOOK_ALIKES) >= 60
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


@pytest.mark.parametrize("kind", FINDERS)
def test_no_expression_runs_away(kind):
    """A megabyte of what each expression likes to begin with takes under a second or so of processor time."""
    pieces = ["a@", "1", "1 ", "1.", ":", "@", "-", "sk-", "eyJ", "a.", "(", "tel ", "0-", "AB12", "a::", "key="]
    pieces += ["a" * 64 + "@" + "b." * 30, "eyJ" + "a" * 50 + ".", "+1 ", "DE89 ", "1:", "192.168.0."]
    for piece in pieces:
        text = piece * (250_000 // len(piece))
        started = time.process_time()
        sum(1 for _ in FINDERS[kind](text))
        assert time.process_time() - started < 1, piece
