"""From a paper's metadata to its document: the full text of the first PDF that is one, else the abstract.

What is served as a PDF often is not: a login page, half a file, a cover sheet, a scan without text. Each of these is a
reason that is counted and kept in the outcome's detail.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from configs.errors import check_positive
from data_processing.crawl_api import ApiContext, Batch
from data_processing.crawl_extract import HTML_TYPES, guarded, read_pdf
from data_processing.crawl_fetch import Fetcher, Gate
from data_processing.crawl_links import read_links
from data_processing.crawl_page import FetchError
from data_processing.crawl_state import KEPT, Item, Outcome
from data_processing.crawl_url import normalise_url
from data_processing.document import Document
from data_processing.pdf_process import is_pdf

# Where full texts lie that may be fetched by machines; fulltext_hosts=['*'] allows any public host.
REPOSITORIES = (
    *("doi.org", "dx.doi.org", "hdl.handle.net"),  # these only redirect; where to is checked again
    *("europepmc.org", "*.ncbi.nlm.nih.gov", "arxiv.org", "export.arxiv.org", "*.biorxiv.org", "*.medrxiv.org"),
    *("zenodo.org", "hal.science", "*.hal.science", "*.archives-ouvertes.fr", "*.osf.io", "storage.googleapis.com"),
    *("eartharxiv.org", "escholarship.org", "*.figshare.com", "*.plos.org", "*.frontiersin.org", "*.copernicus.org"),
)
PDF_TYPES = ("application/pdf", "application/octet-stream", "application/x-pdf", "binary/octet-stream", "text/html")


@dataclass
class PaperConfig:
    """What counts as a full text, and what is taken in its place."""

    full_text: bool = True  # false keeps abstracts alone and fetches no PDF
    abstract_fallback: bool = True
    fulltext_hosts: list[str] = field(default_factory=lambda: list(REPOSITORIES))
    min_pages: int = 2  # a PDF of one page is a cover sheet or an abstract
    min_characters: int = 2000  # of a full text
    min_abstract_characters: int = 200
    max_pdf_bytes: int = 50_000_000
    max_candidates: int = 4  # PDFs that are tried for one paper

    def __post_init__(self):
        check_positive(max_pdf_bytes=self.max_pdf_bytes, max_candidates=self.max_candidates)


@dataclass
class Paper:
    """What a source knows of a paper; `pdf_urls` and `landing_urls` are tried in their order."""

    key: str  # a DOI, or the source's own identifier
    source: str
    title: str
    abstract: str
    date: str
    url: str
    pdf_urls: list[str] = field(default_factory=list)
    landing_urls: list[str] = field(default_factory=list)  # pages that name their PDF by citation_pdf_url
    meta: dict[str, Any] = field(default_factory=dict)


def paper_outcome(paper: Paper, fetcher: Fetcher, config: PaperConfig) -> Outcome:
    """The paper's document with meta.text_kind "full_text" or "abstract", or no_text and what was tried."""
    item = Item(paper.key, paper.source)
    tried: list[str] = []
    if config.full_text:
        for url in candidates(paper, fetcher, config, tried):
            try:
                text, pages = fetch_full_text(url, fetcher, config)
            except FetchError as error:
                tried.append(f"{url}: {error}")
                continue
            meta = {"text_kind": "full_text", "pdf_url": url, "pdf_pages": pages}
            return Outcome(item, KEPT, "full_text", [_document(paper, text, meta)])
    detail = "; ".join(tried) or "no PDF is known"
    if config.abstract_fallback and len(paper.abstract) >= config.min_abstract_characters:
        document = _document(paper, paper.abstract, {"text_kind": "abstract", "no_full_text": detail[:500]})
        return Outcome(item, KEPT, f"abstract ({detail})", [document])
    return Outcome(item, "no_text", detail)


def paper_batches(papers: Iterable[Paper], context: ApiContext, config: PaperConfig, bookmark: Any) -> Iterator[Batch]:
    """A batch a paper, those that are done passed over; the bookmark stays that of the listing page at hand."""
    for paper in papers:
        if paper.key and not context.is_done(paper.key):
            yield Batch([paper_outcome(paper, context.fetcher, config)], bookmark)


def candidates(paper: Paper, fetcher: Fetcher, config: PaperConfig, tried: list[str]) -> Iterator[str]:
    """The PDFs' URLs, each once: those that are known, then those that landing pages name (asked for only then)."""
    seen: set[str] = set()
    for url in paper.pdf_urls:
        normal = normalise_url(url, drop_parameters=())
        if normal is not None and normal not in seen and len(seen) < config.max_candidates:
            seen.add(normal)
            yield normal
    for url in paper.landing_urls:
        normal = normalise_url(url, drop_parameters=())
        if normal is None or len(seen) >= config.max_candidates:
            continue
        try:
            page = fetcher.follow(normal, Gate(HTML_TYPES, 5_000_000))
            found = guarded(read_links, page).pdf_url
        except FetchError as error:
            tried.append(f"{normal}: {error}")
            continue
        if found is None:
            tried.append(f"{normal}: names no PDF")
        elif found not in seen:
            seen.add(found)
            yield found


def fetch_full_text(url: str, fetcher: Fetcher, config: PaperConfig) -> tuple[str, int]:
    """(text, pages) of a PDF on the network. Raises FetchError with what is wrong with it."""
    page = fetcher.follow(url, Gate(PDF_TYPES, config.max_pdf_bytes))
    check_pdf_bytes(page.body)
    found = guarded(read_pdf, page.body)
    if found.pages < config.min_pages:
        raise FetchError("pdf_too_few_pages", f"{found.pages}")
    if len(found.text) < config.min_characters:
        raise FetchError("pdf_too_little_text", f"{len(found.text)} characters")
    return found.text, found.pages


def check_pdf_bytes(body: bytes) -> None:
    """Raise FetchError unless the bytes begin and end as a PDF does (readers allow 1,024 bytes of rubbish there)."""
    if not is_pdf(body):
        start = body[:200].lstrip().lower()
        raise FetchError("not_a_pdf", "HTML" if start.startswith((b"<!doctype html", b"<html")) else repr(body[:20]))
    if b"%%EOF" not in body[-2048:]:
        raise FetchError("pdf_truncated", f"{len(body)} bytes without an end")


def _document(paper: Paper, text: str, meta: dict[str, Any]) -> Document:
    return Document(
        id=f"{paper.source}:{paper.key}",
        source=paper.source,
        text=text,
        title=paper.title,
        url=paper.url,
        date=paper.date,
        meta=paper.meta | meta,
    )
