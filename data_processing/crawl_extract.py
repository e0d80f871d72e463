"""From a fetched page to text, by the same extraction that build_corpus uses (html_process, pdf_process).

What a server calls HTML or PDF need not be one: the bytes decide.
"""

from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from configs.errors import UserError
from data_processing.crawl_page import FetchError, Page
from data_processing.document import Document
from data_processing.html_process import HtmlProcessConfig, binary_kind, extract_html
from data_processing.html_process_encoding import decode_page
from data_processing.pdf_process import ExtractedPdf, extract_pdf, is_pdf

Result = TypeVar("Result")
HTML_TYPES = ("text/html", "application/xhtml+xml")


def extract_document(page: Page, source: str, meta: dict[str, Any]) -> Document:
    """The document of an HTML, text or PDF page. Raises FetchError with the reason when there is no text in it."""
    meta = meta | {"fetched": page.date, "content_type": page.content_type}
    title = ""
    if is_pdf(page.body):
        found = read_pdf(page.body)
        text, title, meta["pdf_pages"] = found.text, found.title, found.pages
    elif page.content_type == "application/pdf":
        raise FetchError("not_a_pdf", repr(page.body[:20]))
    elif kind := binary_kind(page.body):
        raise FetchError("binary", f"{kind} served as {page.content_type}")
    elif page.content_type in HTML_TYPES:
        found = extract_html(page.body, page.charset)
        text, title = found.text, found.title
        meta |= {"encoding": found.encoding, "extraction": found.method}
    else:
        text, meta["encoding"] = decode_page(page.body, page.charset)
    if not text.strip():
        raise FetchError("empty_text", f"no text in {len(page.body)} bytes")
    return Document(page.url, source, text, title, page.url, last_modified(page), meta)


def guarded(read: Callable[..., Result], *arguments: Any) -> Result:
    """What `read` gives; whatever a parser stumbles over becomes a FetchError.

    A page that no parser foresaw must cost that page, not the crawl, which would meet it again after each restart.
    """
    try:
        return read(*arguments)
    except (UserError, FetchError):
        raise
    except Exception as error:
        raise FetchError("extraction_failed", f"{type(error).__name__}: {error}") from error


def extract_fragment(html: str) -> str:
    """The whole text of a piece of HTML that is content already (a post's body)."""
    return extract_html(html.encode("utf-8"), "utf-8", HtmlProcessConfig(main_content=False)).text.strip()


def read_pdf(data: bytes) -> ExtractedPdf:
    """Text, title and pages of a PDF. Raises FetchError when no reader opens it."""
    found = extract_pdf(data)
    if not found.reader:
        raise FetchError("pdf_unreadable", found.problem)
    return found


def last_modified(page: Page) -> str:
    """The day that the Last-Modified header names, 2026-11-29, "" when there is none."""
    try:
        return parsedate_to_datetime(page.headers.get("last-modified", "")).date().isoformat()
    except (TypeError, ValueError):
        return ""
