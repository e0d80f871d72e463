"""The mask_pii stage: addresses and numbers that belong to a person or open an account become stable placeholders.

E-mail and IP addresses, phone, card and IBAN numbers, API keys; version numbers, dates, ISBNs and lists stay. Each
finder looks at candidates that a linear expression proposes and a rule decides (a checksum, a shape, the words before
it). Placeholders are those of Dolma: |||EMAIL_ADDRESS|||, |||PHONE_NUMBER|||, |||IP_ADDRESS||| and so on.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from configs.errors import check_choice
from data_processing.document import Document
from data_processing.mask_pii_accounts import find_api_keys, find_cards, find_ibans
from data_processing.mask_pii_network import find_emails, find_ips
from data_processing.mask_pii_phones import find_phones
from data_processing.stage import StatelessStage

Finder = Callable[[str], Iterator[tuple[int, int]]]
# In this order: what an earlier finder took is no candidate for a later one (a card number is no phone number).
FINDERS: dict[str, Finder] = {
    "API_KEY": find_api_keys,
    "EMAIL_ADDRESS": find_emails,
    "IP_ADDRESS": find_ips,
    "IBAN": find_ibans,
    "CREDIT_CARD": find_cards,
    "PHONE_NUMBER": find_phones,
}


@dataclass
class MaskPiiConfig:
    """Which kinds are masked."""

    kinds: list[str] = field(default_factory=lambda: list(FINDERS))

    def __post_init__(self):
        for kind in self.kinds:
            check_choice("mask_pii.kinds", kind, list(FINDERS))


def placeholder(kind: str) -> str:
    return f"|||{kind}|||"


def mask_text(text: str, kinds: list[str] | None = None) -> tuple[str, Counter]:
    """(text with placeholders, how many of each kind)."""
    counts: Counter = Counter()
    for kind, find in FINDERS.items():
        if kinds is not None and kind not in kinds:
            continue
        parts, at = [], 0
        for start, end in find(text):
            parts += [text[at:start], placeholder(kind)]
            at = end
            counts[kind] += 1
        if at:
            text = "".join([*parts, text[at:]])
    return text, counts


class MaskPii(StatelessStage):
    """Masks in place and writes the counts to meta.pii; drops nothing."""

    name = "mask_pii"

    def __init__(self, config: MaskPiiConfig):
        self.config = config
        self.counts: Counter = Counter()

    def judge(self, document: Document) -> tuple[str, str]:
        document.text, counts = mask_text(document.text, self.config.kinds)
        if counts:
            document.meta["pii"] = dict(sorted(counts.items()))
            self.counts.update(counts)
        return "", ""

    def take_counts(self) -> Counter:
        taken, self.counts = self.counts, Counter()
        return taken
