"""robots.txt as RFC 9309 reads it: the longest matching rule wins, `*` and `$` count, Allow wins a tie.

The standard library's robotparser takes the first match and knows no wildcards, so it allows what sites forbid.
Besides the RFC, Crawl-delay is heeded, since many sites still state it.
"""

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from data_processing.crawl_url import PATH_SAFE, QUERY_SAFE, normalise_escapes

MAX_ROBOTS_BYTES = 512_000  # the RFC asks for at least 500 KiB


@dataclass(slots=True)
class Rules:
    """What one robots.txt says to one crawler: (pattern, whether it allows), and seconds between requests."""

    patterns: list[tuple[str, bool]] = field(default_factory=list)
    delay_s: float = 0.0

    def allows(self, url: str) -> bool:
        """Whether a normalised URL may be fetched."""
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        if target == "/robots.txt":
            return True
        best = (-1, True)
        for pattern, allow in self.patterns:
            if matches(pattern, target):
                best = max(best, (len(pattern), allow))
        return best[1]


ALLOW_ALL = Rules()
FORBID_ALL = Rules([("/", False)])


def matches(pattern: str, target: str) -> bool:
    """Whether `target` begins with the pattern; `*` is any run, a final `$` the end.

    Greedy search piece by piece: linear per piece, where a regular expression of many `.*` could run away.
    """
    anchored = pattern.endswith("$")
    first, *rest = pattern.removesuffix("$").split("*")
    if not target.startswith(first):
        return False
    position = len(first)
    if not rest:
        return not anchored or position == len(target)
    *middle, last = rest
    for piece in middle:
        found = target.find(piece, position)
        if found < 0:
            return False
        position = found + len(piece)
    if anchored:
        return target.endswith(last) and len(target) - len(last) >= position
    return target.find(last, position) >= 0


def parse_robots(content: bytes, product: str) -> Rules:
    """The rules for a crawler whose User-Agent begins with `product`; those of `*` when none names it.

    Groups that name the same crawler are merged. What is beyond MAX_ROBOTS_BYTES is not read, and a line that is cut
    there is dropped.
    """
    if len(content) > MAX_ROBOTS_BYTES:
        content = content[:MAX_ROBOTS_BYTES].rpartition(b"\n")[0]
    text = content.decode("utf-8-sig", errors="replace")
    named, others, found_named = Rules(), Rules(), False
    current: list[Rules] = []
    in_agents = False  # several User-agent lines in a row head one group
    for line in re.split(r"\r\n|\r|\n", text):
        name, separator, value = line.split("#", 1)[0].partition(":")
        name, value = name.strip().lower(), value.strip()
        if not separator:
            continue
        if name == "user-agent":
            current = current if in_agents else []
            in_agents = True
            token = (re.match(r"[a-z_-]+", value.lower()) or [""])[0]
            if value == "*":
                current.append(others)
            elif token == product.lower():
                current.append(named)
                found_named = True
            continue
        if name in ("allow", "disallow", "crawl-delay"):
            in_agents = False
            for rules in current:
                _add_rule(rules, name, value)
    return named if found_named else others


def _add_rule(rules: Rules, name: str, value: str) -> None:
    if name == "crawl-delay":
        if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value):
            rules.delay_s = max(rules.delay_s, float(value))
    elif value:  # "Disallow:" without a path forbids nothing
        path, mark, query = value.partition("?")
        pattern = normalise_escapes(path, PATH_SAFE + "$")
        pattern += mark + normalise_escapes(query, QUERY_SAFE + "$") if mark else ""
        rules.patterns.append((pattern if pattern.startswith(("/", "*")) else "/" + pattern, name == "allow"))
