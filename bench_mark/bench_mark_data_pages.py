"""F1 of extracted pages against their main text, known from the generator's own markup: five that nothing was tuned on.

The threshold of html_process (min_main_share) was set on python3-doc, cmake-doc, python-django-doc and git-doc; these
five are others. The truth is the text of the generator's content element, its navigation taken out.
"""

import re
from collections import Counter
from pathlib import Path

from data_processing.html_process import extract_html, import_resiliparse

# package: (selector of the content, selectors of what is no text in it)
GENERATORS = {
    "postgresql-doc": ("body", ("script", "style", "div.navheader", "div.navfooter", "div.toc")),
    "debian-handbook": ("body", ("script", "style", ".docnav", "#title", "#navigation", ".footer", "div.toc")),
    "octave-doc": ("body", ("script", "style", "div.header", "div.nav-panel")),
    "sqlite3-doc": ("body", ("script", "style", "div.nosearch", ".hd")),
    "linux-doc": ("div[role=main], div.body", ("script", "style", "a.headerlink")),
}
PAGES_EACH, MIN_WORDS = 40, 50


def words(text: str) -> Counter:
    return Counter(re.findall(r"\w+", text.lower()))


def f1(found: Counter, truth: Counter) -> float:
    """Of two bags of words."""
    return 2 * (found & truth).total() / max(found.total() + truth.total(), 1)


def truth_of(page: str, generator: str) -> Counter | None:
    """Words of the main text, None for a page without the content element or with hardly a word."""
    content, no_text = GENERATORS[generator]
    document = import_resiliparse()[1].parse(page).document
    for selector in no_text:
        for element in list(document.query_selector_all(selector)):
            element.decompose()
    element = document.query_selector(content)
    found = words(element.text) if element is not None else Counter()
    return found if found.total() >= MIN_WORDS else None


def page_scores(folder: Path) -> dict[str, list[float]]:
    """{generator: F1 of its pages} of the packages that debian_docs put in folder/html; others are passed over."""
    scores: dict[str, list[float]] = {}
    for generator in GENERATORS:
        files = sorted(path for path in (folder / generator).rglob("*.html") if path.is_file())
        for path in files[:: max(len(files) // (2 * PAGES_EACH), 1)]:
            page = path.read_bytes().decode("utf-8", errors="replace")
            if not 3_000 < len(page) < 300_000 or len(scores.get(generator, [])) >= PAGES_EACH:
                continue
            if generator == "debian-handbook" and "/en-US/" not in str(path):
                continue
            if (truth := truth_of(page, generator)) is not None:
                scores.setdefault(generator, []).append(f1(words(extract_html(path.read_bytes()).text), truth))
    return scores
