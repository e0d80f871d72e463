"""Papers of journals: Crossref lists them (by ISSN, with a deep cursor), Unpaywall says where a free PDF lies.

Copies in repositories come before the publisher's: they may be fetched by machines, and seldom answer with a login
page. A journal that gives hardly any full text is left early (the low-yield gate), and the stats say so.
API documents: https://api.crossref.org/swagger-ui, https://unpaywall.org/products/api.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from configs.errors import UserError
from data_processing.crawl_api import (
    LISTING_GATE,
    ApiAddress,
    ApiContext,
    Batch,
    dig,
    dig_text,
    fetch_api,
    listing_failed,
    parse_json,
    strip_markup,
)
from data_processing.crawl_fetch import API_GATE
from data_processing.crawl_page import FetchError
from data_processing.crawl_papers import Paper, PaperConfig, paper_outcome
from data_processing.crawl_state import Item, Outcome

ISSN = re.compile(r"\d{4}-\d{3}[\dX]")
FIELDS = "DOI,title,abstract,issued,published,container-title,ISSN,license,type"
VERSIONS = ("publishedVersion", "acceptedVersion", "submittedVersion")


@dataclass
class CrossrefConfig(PaperConfig):
    """Which journals, and when one is left."""

    issns: list[str] = field(default_factory=list)
    filter: str = "type:journal-article"  # further Crossref filters, comma-separated: from-pub-date:2015-01-01
    rows: int = 100  # papers a listing page
    max_papers: int = 0  # of one journal; 0 is no limit
    gate_papers: int = 40  # after so many papers of a journal the share of full texts must be ...
    gate_share: float = 0.1  # ... at least this, or the journal is left; 0 never leaves
    crossref_url: str = "https://api.crossref.org"
    unpaywall_url: str = "https://api.unpaywall.org/v2"

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.rows <= 1000:
            raise UserError(f"crossref.rows={self.rows} is outside 1 to 1000, Crossref's bounds; use 100")

    def check_issns(self) -> None:
        """Raise UserError when there are none, or one is misspelt (its check digit included)."""
        if not self.issns:
            raise UserError("source=crossref has no journals; add crossref.issns=[1234-5679]")
        for issn in self.issns:
            if not ISSN.fullmatch(issn) or not has_check_digit(issn):
                raise UserError(f"crossref.issns: {issn!r} is no ISSN; use the form 1234-5679 with its check digit")


def has_check_digit(issn: str) -> bool:
    """Whether the last digit fits: the weighted sum 8..2, 1 is a multiple of 11 (X is ten)."""
    digits = [10 if digit == "X" else int(digit) for digit in issn.replace("-", "")]
    return sum(weight * digit for weight, digit in zip(range(8, 0, -1), digits, strict=True)) % 11 == 0


@dataclass
class CrossrefSource:
    """The journals one after the other. Bookmark: journal, cursor, and how the journal has done so far."""

    config: CrossrefConfig
    name: str = "crossref"

    def __post_init__(self):
        self.config.check_issns()
        self.crossref = ApiAddress(self.config.crossref_url)
        self.unpaywall = ApiAddress(self.config.unpaywall_url)  # 100,000 a day are allowed

    def hosts(self) -> list[str]:
        return [self.crossref.host, self.unpaywall.host, *self.config.fulltext_hosts]

    def batches(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        mark = dict(bookmark) if bookmark else self._start(0, {})
        while mark["journal"] < len(self.config.issns):
            yield from self._journal(context, mark)

    def _start(self, journal: int, left: dict[str, str]) -> dict[str, Any]:
        return {"journal": journal, "cursor": "*", "papers": 0, "full_texts": 0, "left": left}

    def _journal(self, context: ApiContext, mark: dict[str, Any]) -> Iterator[Batch]:
        """The papers of one journal, each a batch; changes `mark` as it goes, at the end to the next journal."""
        issn = self.config.issns[mark["journal"]]
        restarted = False
        while True:
            try:
                items, next_cursor = self._list(context, issn, mark["cursor"])
            except FetchError as error:
                # A cursor lives for minutes: an expired one means the list from its start, where what is done is
                # passed over. Twice without a paper in between is another trouble.
                if restarted or mark["cursor"] == "*" or not error.reason.startswith("http_4"):
                    raise listing_failed(self.name, error) from error
                restarted, mark["cursor"] = True, "*"
                continue
            for work in items:
                if mark["left"].get(issn) or self._has_enough(mark):
                    break
                outcome = self._paper(context, work)
                if outcome is None:
                    continue
                restarted = False
                mark["papers"] += 1
                mark["full_texts"] += outcome.detail == "full_text"
                self._check_yield(issn, mark)
                yield Batch([outcome], dict(mark))
            if not items or mark["left"].get(issn) or self._has_enough(mark):
                mark |= self._start(mark["journal"] + 1, mark["left"])
                yield Batch([], dict(mark))
                return
            mark["cursor"] = next_cursor
            yield Batch([], dict(mark))

    def _has_enough(self, mark: dict[str, Any]) -> bool:
        return bool(self.config.max_papers) and mark["papers"] >= self.config.max_papers

    def _check_yield(self, issn: str, mark: dict[str, Any]) -> None:
        share = self.config.gate_share
        if share and mark["papers"] >= self.config.gate_papers and mark["full_texts"] < share * mark["papers"]:
            mark["left"] = mark["left"] | {issn: f"{mark['full_texts']} full texts in {mark['papers']} papers"}

    def _list(self, context: ApiContext, issn: str, cursor: str) -> tuple[list[Any], str]:
        """One listing page and the cursor of the next. Raises FetchError."""
        parameters = {"filter": ",".join(filter(None, (f"issn:{issn}", self.config.filter))), "rows": self.config.rows}
        parameters |= {"cursor": cursor, "select": FIELDS, "mailto": mail_of(context)}
        page = fetch_api(context.fetcher, self.crossref, "works", parameters, LISTING_GATE)
        message = dig(parse_json(page), "message")
        items, following = dig(message, "items"), dig_text(message, "next-cursor")
        if not isinstance(items, list) or (items and not following):
            raise FetchError("bad_json", "no message.items and next-cursor")
        return items, following

    def _paper(self, context: ApiContext, work: Any) -> Outcome | None:
        """The outcome of one listed work; None when it has no DOI or is done."""
        doi = dig_text(work, "DOI").lower()
        if not doi or context.is_done(doi):
            return None
        paper = paper_from_work(work, doi)
        if self.config.full_text:
            try:
                record = self._ask_unpaywall(context, doi)
            except FetchError as error:
                if error.reason not in ("http_404", "http_422", "bad_json"):
                    return Outcome(Item(doi, self.name), f"unpaywall_{error.reason}", error.detail)
                record = {}
            paper.pdf_urls, paper.landing_urls = order_locations(record)
            paper.meta["license"] = dig_text(record, "best_oa_location", "license") or paper.meta["license"]
        return paper_outcome(paper, context.fetcher, self.config)

    def _ask_unpaywall(self, context: ApiContext, doi: str) -> Any:
        parameters = {"email": mail_of(context)}
        return parse_json(fetch_api(context.fetcher, self.unpaywall, quote(doi, safe="/"), parameters, API_GATE))


def mail_of(context: ApiContext) -> str:
    """The contact when it is an e-mail address: both APIs ask for one."""
    if "@" not in context.contact:
        raise UserError(f"fetch.contact={context.contact!r} is no e-mail address, which Crossref and Unpaywall need")
    return context.contact


def paper_from_work(work: Any, doi: str) -> Paper:
    """Crossref's record of a work; most fields may be missing."""
    parts = dig(work, "published", "date-parts", 0) or dig(work, "issued", "date-parts", 0)
    numbers = [part for part in parts if isinstance(part, int)] if isinstance(parts, list) else []
    date = "-".join(f"{number:0{4 if index == 0 else 2}d}" for index, number in enumerate(numbers[:3]))
    meta = {
        "doi": doi,
        "journal": dig_text(work, "container-title", 0),
        "issn": dig(work, "ISSN") or [],
        "license": dig_text(work, "license", 0, "URL"),
    }
    title, abstract = strip_markup(dig_text(work, "title", 0)), strip_markup(dig_text(work, "abstract"))
    abstract = abstract.removeprefix("Abstract\n")
    return Paper(doi, "crossref", " ".join(title.split()), abstract, date, f"https://doi.org/{doi}", meta=meta)


def order_locations(record: Any) -> tuple[list[str], list[str]]:
    """(PDF URLs, landing pages) of an Unpaywall record: repositories first, published versions before earlier ones."""
    locations = [place for place in (dig(record, "oa_locations") or []) if isinstance(place, dict)]

    def rank(place: dict[str, Any]) -> tuple[bool, int]:
        version = place.get("version")
        return place.get("host_type") != "repository", VERSIONS.index(version) if version in VERSIONS else len(VERSIONS)

    locations.sort(key=rank)
    pdfs = [dig_text(place, "url_for_pdf") for place in locations]
    landing = [dig_text(place, "url_for_landing_page") for place in locations if not place.get("url_for_pdf")]
    return [url for url in pdfs if url], [url for url in landing if url]
