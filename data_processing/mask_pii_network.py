"""Finders of e-mail and IP addresses; each yields (start, end) of what is to be masked, left to right.

Both begin at the one character that an address cannot lack and look at a bounded stretch around it, so that no text
takes more than linear time.
"""

import ipaddress
import re
from collections.abc import Iterator

AT = re.compile(r"(?<=[\w%'~+-])@(?=[^\W_])")
LOCAL_PART = re.compile(r"[\w.+%'~-]{1,64}$")
DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}(?:xn--[a-z0-9-]{2,59}|[^\W\d_]{2,24})(?![\w@])")
DOMAIN_LONGEST = 255
IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\w)")
# Four numbers with dots after one of these words are a version or a heading.
NOT_AN_ADDRESS = re.compile(
    r"(?:\bv(?:er(?:sion)?s?)?\.?|release|build|section|chapter|figure|table|firmware|kernel|windows|chrome|firefox"
    r"|android|\u00a7)[\s:=-]{0,3}$",
    re.IGNORECASE,
)
HEADING = re.compile(r"\.?[ \t\u00a0]{1,4}[^\W\d_]")  # what follows the number of a section
WORDS_BEFORE = 16
IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,8}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9A-Fa-f]{0,4})(?![\w:]|\.\d)")


def find_emails(text: str) -> Iterator[tuple[int, int]]:
    """E-mail addresses, with letters of any script; the last part of the domain must be letters."""
    done = 0
    for sign in AT.finditer(text):
        at = sign.start()
        domain = DOMAIN.match(text, at + 1, at + 1 + DOMAIN_LONGEST)  # first: it fails sooner than the part before
        local = LOCAL_PART.search(text, max(done, at - 64), at) if domain else None
        name = local.group().lstrip(".'-~%") if local else ""
        if name and not name.endswith("."):
            done = domain.end()
            yield at - len(name), done


def _is_ipv6(candidate: str) -> bool:
    """An address, and not a C++ name (ab::cd): it has a digit and more than one colon pair's worth of text."""
    try:
        ipaddress.IPv6Address(candidate)
    except ValueError:
        return False
    return any(map(str.isdigit, candidate)) and len(candidate) >= 3


def find_ips(text: str) -> Iterator[tuple[int, int]]:
    """IPv4 addresses that are no version numbers, and IPv6 addresses in every valid notation."""
    found = []
    for match in IPV4.finditer(text):
        parts = match.group().split(".")
        if any(int(part) > 255 or (len(part) > 1 and part[0] == "0") for part in parts):
            continue
        if NOT_AN_ADDRESS.search(text, max(match.start() - WORDS_BEFORE, 0), match.start()):
            continue
        at_line_start = match.start() == 0 or text[match.start() - 1] == "\n"
        if at_line_start and all(int(part) < 100 for part in parts) and HEADING.match(text, match.end()):
            continue
        found.append(match.span())
    if "::" in text or text.count(":") >= 6:
        found += [match.span() for match in IPV6.finditer(text) if _is_ipv6(match.group())]
        found.sort()
    done = 0
    for start, end in found:
        if start >= done:
            done = end
            yield start, end
