"""What a page says about where to go and what to keep: links, <base>, robots marks, and where its PDF lies.

Parsed by resiliparse (lexbor), which builds the tree that a browser would, behind the guards of html_process: a page
nested so deep that no parser should see it gives no links.
"""

import re
from dataclasses import dataclass, field

from data_processing.crawl_page import Page
from data_processing.crawl_url import TRACKING_PARAMETERS, normalise_url
from data_processing.html_process import import_resiliparse
from data_processing.html_process_encoding import decode_page
from data_processing.html_process_guard import MAX_DEPTH, cut_long_tags, nesting_depth

MAX_LINKS = 5000  # of one page; what lists more is made by a machine


@dataclass
class PageLinks:
    """The links in their order, each once, as normalised URLs; whether the page wants to be kept and followed."""

    urls: list[str] = field(default_factory=list)
    index: bool = True
    follow: bool = True
    pdf_url: str | None = None  # citation_pdf_url, by which repositories tell Google Scholar where the paper is


def read_links(page: Page, drop_parameters: tuple[str, ...] = TRACKING_PARAMETERS) -> PageLinks:
    """The links of an HTML page; rel=nofollow and the robots marks of page and header are heeded."""
    links = PageLinks()
    _read_marks(links, page.headers.get("x-robots-tag", ""))
    text = cut_long_tags(decode_page(page.body, page.charset)[0])
    if nesting_depth(text) > MAX_DEPTH:
        return links
    document = import_resiliparse()[1].parse(text).document
    for meta in document.query_selector_all("meta[name][content]"):
        name = meta.getattr("name").strip().lower()
        if name in ("robots", "mew-crawler"):
            _read_marks(links, meta.getattr("content"))
        elif name == "citation_pdf_url" and links.pdf_url is None:
            links.pdf_url = normalise_url(meta.getattr("content"), page.url, ())
    base_element = document.query_selector("base[href]")
    base = page.url
    if base_element is not None:
        base = normalise_url(base_element.getattr("href"), page.url, ()) or page.url
    urls: dict[str, None] = {}
    for element in document.query_selector_all("a[href], area[href]"):
        if "nofollow" in (element.getattr("rel") or "").lower().split():
            continue
        url = normalise_url(element.getattr("href"), base, drop_parameters)
        if url is not None and url != page.url:
            urls[url] = None
        if len(urls) == MAX_LINKS:
            break
    links.urls = list(urls)
    return links


def _read_marks(links: PageLinks, content: str) -> None:
    """noindex, nofollow and none; a mark for a crawler of another name ("otherbot: noindex") is not for us."""
    for mark in content.lower().split(","):
        word = re.sub(r"^\s*(mew-crawler|robots)\s*:", "", mark).strip()
        links.index &= word not in ("noindex", "none")
        links.follow &= word not in ("nofollow", "none")
