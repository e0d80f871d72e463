"""EarthArXiv preprints: by OAI-PMH from its own site (Janeway, since 2020), or from OSF, where the older ones lie.

OAI gives Dublin Core whose identifiers are a DOI and the download's address; where that is missing the landing page
names the PDF (citation_pdf_url). OSF's API (https://developer.osf.io) names a preprint's file, whose record holds the
download link.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from configs.errors import check_choice
from data_processing.crawl_api import (
    API_GATE,
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
from data_processing.crawl_oai import DC, OAI, OaiList, identifier_of, is_deleted, text_at, texts_at
from data_processing.crawl_page import FetchError
from data_processing.crawl_papers import Paper, PaperConfig, paper_batches
from data_processing.crawl_url import normalise_url

DOI = re.compile(r"(?<![\d.])10\.\d{4,9}/\S{1,200}")
DUBLIN_CORE = "{http://www.openarchives.org/OAI/2.0/oai_dc/}"


@dataclass
class EarthArxivConfig(PaperConfig):
    """`via` chooses the API; `provider` is OSF's name for the preprint server."""

    via: str = "oai"
    provider: str = "eartharxiv"
    from_date: str = ""  # with oai
    until_date: str = ""
    rows: int = 100  # preprints a page of OSF, at most 100
    oai_url: str = "https://eartharxiv.org/api/oai/"
    osf_url: str = "https://api.osf.io/v2"

    def __post_init__(self):
        super().__post_init__()
        check_choice("eartharxiv.via", self.via, ("oai", "osf"))


@dataclass
class EarthArxivSource:
    """Preprints in the order of the API."""

    config: EarthArxivConfig
    name: str = "eartharxiv"

    def __post_init__(self):
        self.oai, self.osf = ApiAddress(self.config.oai_url), ApiAddress(self.config.osf_url)

    def hosts(self) -> list[str]:
        return [self.oai.host if self.config.via == "oai" else self.osf.host, *self.config.fulltext_hosts]

    def batches(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        yield from self._by_oai(context, bookmark) if self.config.via == "oai" else self._by_osf(context, bookmark)

    def _by_oai(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        config = self.config
        records = OaiList(self.name, self.oai, "oai_dc", "", config.from_date, config.until_date)
        token = bookmark["token"] if bookmark else ""
        if token is None:
            return
        for page, current, following in records.pages(context, token):
            papers = (paper_from_dublin_core(record) for record in page if not is_deleted(record))
            yield from paper_batches(papers, context, config, {"token": current})
            yield Batch([], {"token": following or None})

    def _by_osf(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        number = bookmark["page"] if bookmark else 1
        while number:
            parameters = {"filter[provider]": self.config.provider, "page[size]": self.config.rows, "page": number}
            try:
                answer = parse_json(fetch_api(context.fetcher, self.osf, "preprints/", parameters, LISTING_GATE))
                if not isinstance(dig(answer, "data"), list):
                    raise FetchError("bad_json", "no data")
            except FetchError as error:
                raise listing_failed(self.name, error) from error
            papers = (self._from_osf(context, entry) for entry in answer["data"])
            yield from paper_batches(papers, context, self.config, {"page": number})
            number = number + 1 if dig(answer, "links", "next") else 0
            yield Batch([], {"page": number})

    def _from_osf(self, context: ApiContext, entry: Any) -> Paper:
        key, attributes = dig_text(entry, "id"), dig(entry, "attributes")
        doi = dig_text(entry, "links", "preprint_doi").removeprefix("https://doi.org/")
        title, abstract = (strip_markup(dig_text(attributes, name)) for name in ("title", "description"))
        pdfs = []
        if self.config.full_text and not context.is_done(key):
            pdfs = self._osf_files(context, entry)
        return Paper(
            key=key,
            source=self.name,
            title=" ".join(title.split()),
            abstract=abstract,
            date=dig_text(attributes, "date_published")[:10],
            url=dig_text(entry, "links", "html"),
            pdf_urls=pdfs,
            meta={"doi": doi, "subjects": dig(attributes, "tags") or []},
        )

    def _osf_files(self, context: ApiContext, entry: Any) -> list[str]:
        """The download link of the preprint's file; none when its record cannot be had."""
        href = dig_text(entry, "relationships", "primary_file", "links", "related", "href")
        link = normalise_url(href, drop_parameters=())
        if link is None:
            return []
        try:
            record = parse_json(context.fetcher.follow(link, API_GATE))
        except FetchError:
            return []
        download = dig_text(record, "data", "links", "download")
        return [download] if download else []


def paper_from_dublin_core(record: Element) -> Paper:
    """A record of oai_dc; its identifiers are a DOI and web addresses in any order."""
    body = record.find(f"{OAI}metadata/{DUBLIN_CORE}dc")
    names = texts_at(body, f"{DC}identifier") + texts_at(body, f"{DC}relation")
    doi = next((found.group() for found in map(DOI.search, names) if found), "")
    pages = [name for name in names if name.startswith(("http://", "https://")) and "doi.org/" not in name]
    pdfs = [name for name in pages if name.lower().endswith(".pdf") or "/download" in name]
    landing = [name for name in pages if name not in pdfs]
    abstracts = sorted(texts_at(body, f"{DC}description"), key=len)
    return Paper(
        key=identifier_of(record),
        source="eartharxiv",
        title=text_at(body, f"{DC}title"),
        abstract=strip_markup(abstracts[-1]) if abstracts else "",
        date=text_at(body, f"{DC}date")[:10],
        url=next(iter(landing), "") or (f"https://doi.org/{doi}" if doi else next(iter(pdfs), "")),
        pdf_urls=pdfs,
        landing_urls=landing,
        meta={"doi": doi, "license": text_at(body, f"{DC}rights"), "subjects": texts_at(body, f"{DC}subject")},
    )
