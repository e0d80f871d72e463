"""What a page says about where to go and what to keep: links, <base>, robots marks, and where its PDF lies.

Parsed by resiliparse (lexbor), which builds the tree that a browser would, behind the guards of html_process: of a page
that is nested too deep for a parser the tags alone are read.
"""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.errors import missing_extra
from data_processing.crawl_page import Page
from data_processing.crawl_url import TRACKING_PARAMETERS, normalise_url
from data_processing.html_process_encoding import decode_page
from data_processing.html_process_guard import MAX_DEPTH, cut_long_tags, nesting_depth

TAG = re.compile(r"<(a|area|base|meta)(\s[^<>]{0,4000})>", re.IGNORECASE)  # linear: a tag ends at the next "<" or ">"
ATTRIBUTE = re.compile(r"""(\w[\w-]{0,30})\s{0,8}=\s{0,8}("[^"]*"|'[^']*'|[^\s"']+)""")
MAX_LINKS = 5000  # of one page; what lists more is made by a machine


@dataclass
class PageLinks:
    """The links in their order, each once, as normalised URLs; whether the page wants to be kept and followed."""

    urls: list[str] = field(default_factory=list)
    index: bool = True
    follow: bool = True
    pdf_url: str | None = None  # citation_pdf_url, by which repositories tell Google Scholar where the paper is


def import_parser():
    """(HTMLTree, traverse_dom), or the UserError that names the install command."""
    try:
        from resiliparse.parse.html import HTMLTree, traverse_dom
    except ImportError as error:
        raise missing_extra("resiliparse", "data") from error
    return HTMLTree, traverse_dom


@dataclass
class _Found:
    """The attributes that matter, in the order of the page."""

    metas: list[tuple[str, str]] = field(default_factory=list)  # (name, content)
    bases: list[str] = field(default_factory=list)
    anchors: list[tuple[str, str]] = field(default_factory=list)  # (href, rel)

    def add(self, tag: str, attribute: Callable[[str], str | None]) -> None:
        """Keep what matters of an element; `attribute` gives the value of a name, None when it has none."""
        if tag in ("a", "area"):
            href = attribute("href")
            if href is not None:
                self.anchors.append((href, attribute("rel") or ""))
        elif tag == "meta":
            self.metas.append(((attribute("name") or "").strip().lower(), attribute("content") or ""))
        elif tag == "base" and attribute("href"):
            self.bases.append(attribute("href"))


def read_links(page: Page, drop_parameters: tuple[str, ...] = TRACKING_PARAMETERS) -> PageLinks:
    """The links of an HTML page; rel=nofollow and the robots marks of page and header are heeded."""
    links = PageLinks()
    _read_marks(links, page.headers.get("x-robots-tag", ""))
    found = _find_elements(decode_page(page.body, page.charset)[0])
    for name, content in found.metas:
        if name in ("robots", "mew-crawler"):
            _read_marks(links, content)
        elif name == "citation_pdf_url" and links.pdf_url is None:
            links.pdf_url = normalise_url(content, page.url, ())
    base = next((normalise_url(href, page.url, ()) for href in found.bases), None) or page.url
    urls: dict[str, None] = {}
    for href, rel in found.anchors:
        url = None if "nofollow" in rel.lower().split() else normalise_url(href, base, drop_parameters)
        if url is not None and url != page.url:
            urls[url] = None
        if len(urls) == MAX_LINKS:
            break
    links.urls = list(urls)
    return links


def _find_elements(text: str) -> _Found:
    """The elements that matter, by one walk of the tree.

    A collection of resiliparse 2.0 evaluates its selector anew for each index, which is quadratic: an index page of
    2.6 MB had not ended after five minutes.
    """
    found = _Found()
    text = cut_long_tags(text)
    if nesting_depth(text) > MAX_DEPTH:
        for tag, inner in TAG.findall(text):
            values = {name.lower(): html.unescape(value.strip("\"'")) for name, value in ATTRIBUTE.findall(inner)}
            found.add(tag.lower(), values.get)
        return found
    tree_class, traverse = import_parser()

    def visit(context) -> None:
        found.add(context.node.tag, context.node.getattr)

    tree = tree_class.parse(text)
    for part in (tree.head, tree.body):
        if part is not None:
            traverse(part, visit, elements_only=True)
    return found


def _read_marks(links: PageLinks, content: str) -> None:
    """noindex, nofollow and none; a mark for a crawler of another name ("otherbot: noindex") is not for us."""
    for mark in content.lower().split(","):
        word = re.sub(r"^\s*(mew-crawler|robots)\s*:", "", mark).strip()
        links.index &= word not in ("noindex", "none")
        links.follow &= word not in ("nofollow", "none")
