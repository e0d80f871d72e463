"""What an API source is, and how it asks: JSON and XML answers, parameters in the URL, failures told apart.

A source gives batches: outcomes of items and a bookmark, committed together. After a kill it is handed the last
bookmark and goes on; items of the batch at hand that were committed already are known by `is_done`.
"""

import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import urlencode
from xml.etree import ElementTree

from configs.errors import UserError
from data_processing.crawl_documents import replace_surrogates
from data_processing.crawl_fetch import API_GATE, Fetcher, Gate
from data_processing.crawl_page import FetchError, Page
from data_processing.crawl_state import Outcome
from data_processing.crawl_url import host_of, normalise_url

LISTING_GATE = replace(API_GATE, use_cache=False)  # a cursor of a stored listing may have expired
TAG = re.compile(r"<[^<>]*>")
XML_DECLARATION = re.compile(rb"<!(DOCTYPE|ENTITY)", re.IGNORECASE)


@dataclass
class Batch:
    """Outcomes to commit, and where the source goes on after them (any JSON value)."""

    outcomes: list[Outcome]
    bookmark: Any


@dataclass
class ApiContext:
    """What a source works with."""

    fetcher: Fetcher
    is_done: Callable[[str], bool]
    contact: str = ""


class ApiSource(Protocol):
    """Documents behind an API."""

    name: str

    def hosts(self) -> list[str]:
        """The hosts that the source may ask."""

    def batches(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        """Everything from the bookmark on (None is the start). Raises UserError when a listing cannot be had."""


@dataclass
class ApiAddress:
    """Where an API lives and how often it wants to be asked."""

    url: str
    delay_s: float = 1.0
    parameters: dict[str, str] = field(default_factory=dict)  # sent with every request

    @property
    def host(self) -> str:
        """Its host. Raises UserError when the address is no URL."""
        url = normalise_url(self.url, drop_parameters=())
        if url is None:
            raise UserError(f"API address {self.url!r} is no http(s) URL; use https://api.example.org")
        return host_of(url)


def build_url(base: str, path: str = "", parameters: dict[str, Any] | None = None) -> str:
    """A normalised URL; empty parameters are left out."""
    given = {name: value for name, value in (parameters or {}).items() if value not in ("", None)}
    url = f"{base.rstrip('/')}/{path.lstrip('/')}" if path else base
    url += f"?{urlencode(given)}" if given else ""
    normalised = normalise_url(url, drop_parameters=())
    if normalised is None:
        raise FetchError("bad_url", url[:200])
    return normalised


def fetch_api(fetcher: Fetcher, address: ApiAddress, path: str, parameters: dict[str, Any], gate: Gate) -> Page:
    """One request to an API at its own pace. Raises FetchError."""
    fetcher.pace.set_delay(address.host, address.delay_s)
    return fetcher.follow(build_url(address.url, path, address.parameters | parameters), gate)


def parse_json(page: Page) -> Any:
    """The JSON value of a page. Raises FetchError."""
    try:
        return replace_surrogates(json.loads(page.body))
    except (ValueError, RecursionError) as error:
        raise FetchError("bad_json", f"{page.url}: {error}") from error


def parse_xml(page: Page) -> ElementTree.Element:
    """The root element of a page. Raises FetchError; a DOCTYPE is refused, since entities can explode."""
    if XML_DECLARATION.search(page.body):
        raise FetchError("bad_xml", f"{page.url}: has a DOCTYPE")
    try:
        return ElementTree.fromstring(page.body)
    except ElementTree.ParseError as error:
        raise FetchError("bad_xml", f"{page.url}: {error}") from error


def listing_failed(name: str, error: FetchError) -> UserError:
    """The error for a list that an API does not give: the crawl cannot go on, but nothing is lost."""
    return UserError(f"source={name}: the listing cannot be had ({error}); the same command goes on from here")


def strip_markup(text: str) -> str:
    """A fragment of HTML or JATS (titles, abstracts) as one plain line a paragraph."""
    text = re.sub(r"</(?:jats:)?(?:p|title|sec|list-item)>|<br ?/?>", "\n", text)
    lines = html.unescape(TAG.sub("", text)).split("\n")
    return "\n".join(line for line in (" ".join(line.split()) for line in lines) if line)


def dig(value: Any, *path: str | int) -> Any:
    """value[path[0]][path[1]]..., None when a step is not there: API answers leave out what they do not know."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and -len(value) <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def dig_text(value: Any, *path: str | int) -> str:
    """The string at a path, "" when there is none."""
    found = dig(value, *path)
    return found if isinstance(found, str) else ""
