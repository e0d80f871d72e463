"""F1 of extracted pages against their main text, known from the generator's own markup, for five generators.

The threshold of html_process (min_main_share) was set on python3-doc, cmake-doc, python-django-doc and git-doc; these
five are others, though the curve over all nine had been seen. The truth is the text of the generator's content element,
its navigation taken out.
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


def _is_candidate(path: Path, generator: str) -> bool:
    """A page of ordinary size; of the handbook, which comes in 26 languages, the English one."""
    ordinary = path.is_file() and 3_000 < path.stat().st_size < 300_000
    return ordinary and (generator != "debian-handbook" or "/en-US/" in str(path))


def page_scores(folder: Path) -> dict[str, list[float]]:
    """{generator: F1 of its pages} of the packages that debian_docs put in folder/html; others are passed over."""
    scores: dict[str, list[float]] = {}
    for generator in GENERATORS:
        files = [path for path in sorted((folder / generator).rglob("*.html")) if _is_candidate(path, generator)]
        for path in files[:: max(len(files) // (2 * PAGES_EACH), 1)]:
            if len(scores.get(generator, [])) >= PAGES_EACH:
                break
            data = path.read_bytes()
            if (truth := truth_of(data.decode("utf-8", errors="replace"), generator)) is not None:
                scores.setdefault(generator, []).append(f1(words(extract_html(data).text), truth))
    return scores
