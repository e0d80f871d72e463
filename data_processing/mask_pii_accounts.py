"""Finders of card numbers (Luhn), IBANs (ISO 7064 mod 97-10) and API keys; each yields (start, end), left to right."""

import re
from collections.abc import Iterator

CARD = re.compile(r"(?<![\w.,+-])\d(?:[ -]?\d){11,18}(?![\w-]|[.,]\d)")
CARD_SHAPE = re.compile(
    r"\d{12,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{1,7}|\d{4}([ -])\d{6}\2\d{4,5}"
    r"|\d{4}([ -])\d{4}\3\d{4}\3\d{4}\3\d{3}"
)
CARD_ISSUER = re.compile(r"4|5[0-8]|2[2-7]|3[04-9]|6[0-9]")
IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]){11,30}(?![A-Za-z0-9])")
IBAN_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 "
    "FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 "
    "LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 "
    "SA24 SC31 SD18 SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20"
)
LENGTH_OF = {entry[:2]: int(entry[2:]) for entry in IBAN_LENGTHS.split()}
API_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{36,251}|github_pat_[A-Za-z0-9_]{22,251}|glpat-[\w-]{20,64}"
    r"|sk-(?:proj-|ant-|or-)?[A-Za-z0-9_-]{20,200}|[srp]k_(?:live|test)_[A-Za-z0-9]{16,200}"
    r"|xox[abeposr]-[A-Za-z0-9-]{10,250}|AIza[\w-]{35}|ya29\.[\w-]{20,250}|hf_[A-Za-z0-9]{30,64}|npm_[A-Za-z0-9]{36}"
    r"|pypi-[\w-]{50,250}|SG\.[\w-]{16,32}\.[\w-]{16,64}|dop_v1_[a-f0-9]{64}|shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}"
    r"|eyJ[\w-]{10,2000}\.eyJ[\w-]{10,4000}\.[\w-]{10,2000}"
    r")(?![A-Za-z0-9])"
)
# What a text must hold before an expression is tried on it: substring searches are a hundred times as fast.
KEY_PREFIXES = "AKIA ASIA AROA AIDA ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- sk- k_live_ k_test_ xox".split()
KEY_PREFIXES += "AIza ya29. hf_ npm_ pypi- SG. dop_v1_ shpat_ shpca_ shppa_ shpss_ eyJ".split()
KEY_NAMES = ("key", "token", "secret")
NAMED_KEY = re.compile(
    r"(?:api[_-]?key|access[_-]?key|secret[_-]?key|auth[_-]?token|access[_-]?token|client[_-]?secret|api[_-]?token|"
    r"secret[_-]?access[_-]?key)[\"']?\s{0,4}[:=]\s{0,4}[\"']?([A-Za-z0-9/+_=.-]{16,200})",
    re.IGNORECASE,
)
PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z]{2,10} ){0,2}PRIVATE KEY-----")
PRIVATE_KEY_END = "PRIVATE KEY-----"


def passes_luhn(digits: str) -> bool:
    """The checksum of card numbers: from the right, every second digit doubled, digits added up, divisible by ten."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def find_cards(text: str) -> Iterator[tuple[int, int]]:
    """Numbers of 13 to 19 digits (12 for Maestro) with an issuer's first digits, one grouping and a right checksum."""
    for match in CARD.finditer(text):
        shown = match.group()
        digits = shown.replace(" ", "").replace("-", "")
        if CARD_SHAPE.fullmatch(shown) and CARD_ISSUER.match(digits) and passes_luhn(digits) and len(set(digits)) > 1:
            yield match.span()


def is_iban(compact: str) -> bool:
    """Country, its length, and the checksum: letters as 10..35, the first four at the end, remainder 1 modulo 97."""
    if LENGTH_OF.get(compact[:2]) != len(compact):
        return False
    return int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97 == 1


def find_ibans(text: str) -> Iterator[tuple[int, int]]:
    """IBANs, compact or in groups; capitals that follow after a space are not part of it."""
    for match in IBAN.finditer(text):
        length, seen = LENGTH_OF.get(match.group()[:2], 0), 0
        for offset, character in enumerate(match.group()):
            seen += character.isalnum()
            if length and seen == length:
                shown = match.group()[: offset + 1]
                if is_iban(shown.replace(" ", "").replace("-", "")):
                    yield match.start(), match.start() + offset + 1
                break


def _looks_random(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.isalpha, value)) and len(set(value)) >= 8


def find_api_keys(text: str) -> Iterator[tuple[int, int]]:
    """Keys of known shape, values given to a name such as api_key, and PEM private keys."""
    found = []
    if any(prefix in text for prefix in KEY_PREFIXES):
        found += [match.span() for match in API_KEY.finditer(text) if _looks_random(match.group())]
    low = text.lower()
    if any(name in low for name in KEY_NAMES):
        found += [match.span(1) for match in NAMED_KEY.finditer(text) if _looks_random(match.group(1))]
    for match in PRIVATE_KEY.finditer(text) if "PRIVATE KEY-----" in text else ():
        end = text.find(PRIVATE_KEY_END, match.end())
        found.append((match.start(), end + len(PRIVATE_KEY_END) if end >= 0 else match.end()))
    done = 0
    for start, end in sorted(found):
        if start >= done:
            done = end
            yield start, end
