"""arXiv: a search by its Atom API (at most some ten thousand papers), or a whole set by OAI-PMH; full text from PDFs.

https://info.arxiv.org/help/api/user-manual.html, https://info.arxiv.org/help/oa/index.html. arXiv asks for three
seconds between API requests, and for the use of export.arxiv.org by programs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from configs.errors import UserError
from data_processing.crawl_api import LISTING_GATE, ApiAddress, ApiContext, Batch, fetch_api, listing_failed, parse_xml
from data_processing.crawl_oai import OAI, OaiList, is_deleted, text_at
from data_processing.crawl_page import FetchError
from data_processing.crawl_papers import Paper, PaperConfig, paper_batches

ATOM = "{http://www.w3.org/2005/Atom}"
ARXIV_ATOM = "{http://arxiv.org/schemas/atom}"
ARXIV_OAI = "{http://arxiv.org/OAI/arXiv/}"
OPENSEARCH = "{http://a9.com/-/spec/opensearch/1.1/}"
VERSION = re.compile(r"v\d+$")
EMPTY_TRIES = 3  # the API sometimes answers a page in the middle with no entry at all


@dataclass
class ArxivConfig(PaperConfig):
    """Either `query` (Atom, "cat:cs.CL AND abs:parsing") or `set` (OAI, "cs" or "physics:hep-th")."""

    query: str = ""
    set: str = ""
    from_date: str = ""  # with `set`: changed since, 2024-01-31
    until_date: str = ""
    rows: int = 100  # papers a page of the Atom API
    atom_url: str = "https://export.arxiv.org/api"
    oai_url: str = "https://oaipmh.arxiv.org/oai"
    pdf_url: str = "https://export.arxiv.org/pdf"

    def check_list(self) -> None:
        if bool(self.query) == bool(self.set):
            raise UserError(
                f"arxiv.query={self.query!r} and arxiv.set={self.set!r}: give one of the two, arxiv.query=cat:cs.CL"
                " or arxiv.set=cs"
            )


@dataclass
class ArxivSource:
    """Papers in the order of their submission (query) or of the repository (set)."""

    config: ArxivConfig
    name: str = "arxiv"

    def __post_init__(self):
        self.config.check_list()
        self.atom = ApiAddress(self.config.atom_url, delay_s=3.0)
        self.oai = ApiAddress(self.config.oai_url, delay_s=3.0)
        self.pdf = ApiAddress(self.config.pdf_url)

    def hosts(self) -> list[str]:
        return [self.atom.host, self.oai.host, self.pdf.host, *self.config.fulltext_hosts]

    def batches(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        yield from self._by_query(context, bookmark) if self.config.query else self._by_set(context, bookmark)

    def _by_query(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        start = bookmark["start"] if bookmark else 0
        while True:
            entries, total = self._search(context, start)
            papers = (self._from_atom(entry) for entry in entries)
            yield from paper_batches(papers, context, self.config, {"start": start})
            start += len(entries)
            yield Batch([], {"start": start})
            if not entries or start >= total:
                return

    def _search(self, context: ApiContext, start: int) -> tuple[list[Element], int]:
        """(entries, number of all results); an empty page before the end is asked for again."""
        parameters = {"search_query": self.config.query, "start": start, "max_results": self.config.rows}
        parameters |= {"sortBy": "submittedDate", "sortOrder": "ascending"}
        for _ in range(EMPTY_TRIES):
            try:
                root = parse_xml(fetch_api(context.fetcher, self.atom, "query", parameters, LISTING_GATE))
            except FetchError as error:
                raise listing_failed(self.name, error) from error
            entries = root.findall(f"{ATOM}entry")
            if entries and "/api/errors" in text_at(entries[0], f"{ATOM}id"):
                raise UserError(f"arxiv.query={self.config.query!r}: {text_at(entries[0], f'{ATOM}summary')}")
            total = text_at(root, f"{OPENSEARCH}totalResults")
            total = int(total) if total.isdigit() else 0
            if entries or start >= total:
                return entries, total
        raise listing_failed(self.name, FetchError("empty_page", f"start={start} of {total}"))

    def _from_atom(self, entry: Element) -> Paper:
        arxiv_id = VERSION.sub("", text_at(entry, f"{ATOM}id").rpartition("/abs/")[2])
        categories = [element.get("term", "") for element in entry.findall(f"{ATOM}category")]
        meta = {"categories": categories, "doi": text_at(entry, f"{ARXIV_ATOM}doi")}
        date = text_at(entry, f"{ATOM}published")[:10]
        return self._paper(arxiv_id, text_at(entry, f"{ATOM}title"), text_at(entry, f"{ATOM}summary"), date, meta)

    def _by_set(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        config = self.config
        records = OaiList(self.name, self.oai, "arXiv", config.set, config.from_date, config.until_date)
        token = bookmark["token"] if bookmark else ""
        if token is None:
            return
        for page, current, following in records.pages(context, token):
            papers = (self._from_oai(record) for record in page if not is_deleted(record))
            yield from paper_batches(papers, context, config, {"token": current})
            yield Batch([], {"token": following or None})

    def _from_oai(self, record: Element) -> Paper:
        body = record.find(f"{OAI}metadata/{ARXIV_OAI}arXiv")
        field = {name: text_at(body, f"{ARXIV_OAI}{name}") for name in ("id", "title", "abstract", "created")}
        meta = {
            "categories": text_at(body, f"{ARXIV_OAI}categories").split(),
            "doi": text_at(body, f"{ARXIV_OAI}doi"),
            "license": text_at(body, f"{ARXIV_OAI}license"),
        }
        return self._paper(field["id"], field["title"], field["abstract"], field["created"], meta)

    def _paper(self, arxiv_id: str, title: str, abstract: str, date: str, meta: dict[str, Any]) -> Paper:
        pdf = f"{self.config.pdf_url}/{arxiv_id}"
        return Paper(arxiv_id, "arxiv", title, abstract, date, f"https://arxiv.org/abs/{arxiv_id}", [pdf], [], meta)
