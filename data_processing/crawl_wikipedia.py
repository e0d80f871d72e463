"""Wikipedia articles as plain text by the MediaWiki API: named ones, those of a category and its subcategories, or all.

https://www.mediawiki.org/wiki/API:Main_page, extension TextExtracts. One article a request, in sequence and with
maxlag, as the API's etiquette asks. For a whole Wikipedia take a dump: build_corpus source=hf
path=wikimedia/wikipedia.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from configs.errors import UserError
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
)
from data_processing.crawl_fetch import Gate
from data_processing.crawl_pace import retry_after_s
from data_processing.crawl_page import FetchError
from data_processing.crawl_state import KEPT, Item, Outcome
from data_processing.document import Document

ARTICLES, CATEGORIES = 0, 14  # namespaces
MAX_HEADING_CHARACTERS = 500
BUSY = ("maxlag", "ratelimited", "readonly")


@dataclass
class WikipediaConfig:
    """Which articles; exactly one of titles, category and all_pages."""

    language: str = "en"
    titles: list[str] = field(default_factory=list)
    category: str = ""  # "Category:Physics" or "Physics"
    category_depth: int = 1  # subcategories below it; 0 takes the category alone
    all_pages: bool = False
    min_characters: int = 500
    url: str = "https://{language}.wikipedia.org/w/api.php"

    def check_choice(self) -> None:
        if [bool(self.titles), bool(self.category), self.all_pages].count(True) != 1:
            raise UserError(
                "source=wikipedia takes exactly one of wikipedia.titles=[Physics], wikipedia.category=Physics and"
                " wikipedia.all_pages=true"
            )
        if not re.fullmatch(r"[a-z][a-z0-9-]{1,20}", self.language):
            raise UserError(f"wikipedia.language={self.language!r} is no language code; use en, de, simple, ...")


@dataclass
class WikipediaSource:
    """Articles in the order of the list. Bookmark: the categories still to read and the place in the first."""

    config: WikipediaConfig
    name: str = "wikipedia"

    def __post_init__(self):
        self.config.check_choice()
        fixed = {"action": "query", "format": "json", "formatversion": "2", "maxlag": "5"}
        self.api = ApiAddress(self.config.url.replace("{language}", self.config.language), 1.0, fixed)

    def hosts(self) -> list[str]:
        return [self.api.host]

    def batches(self, context: ApiContext, bookmark: Any) -> Iterator[Batch]:
        if self.config.titles:
            for title in self.config.titles:
                if not context.is_done(self._key(title)):
                    yield Batch([self._article(context, title)], None)
            return
        mark = bookmark or {"queue": [[self.config.category, 0]], "seen": [self.config.category], "continue": {}}
        while mark["queue"]:
            members, go_on = self._members(context, mark)
            for member in members:
                title = dig_text(member, "title")
                if dig(member, "ns") == ARTICLES and title and not context.is_done(self._key(title)):
                    yield Batch([self._article(context, title)], mark)
            mark = self._next_mark(mark, members, go_on)
            yield Batch([], mark)

    def _key(self, title: str) -> str:
        return f"{self.config.language}:{title}"

    def _members(self, context: ApiContext, mark: dict[str, Any]) -> tuple[list[Any], dict[str, str]]:
        """One page of the list at hand, and the parameters that continue it ({} at its end)."""
        if self.config.all_pages:
            name = "allpages"
            parameters = {"list": name, "apnamespace": ARTICLES, "apfilterredir": "nonredirects", "aplimit": 500}
        else:
            name = "categorymembers"
            title = mark["queue"][0][0]
            title = title if ":" in title else f"Category:{title}"
            parameters = {"list": name, "cmtitle": title, "cmtype": "page|subcat", "cmlimit": 500}
        try:
            answer = self._ask(context, parameters | mark["continue"], LISTING_GATE)
            members = dig(answer, "query", name)
            if not isinstance(members, list):
                raise FetchError("bad_json", f"no query.{name}")
        except FetchError as error:
            raise listing_failed(self.name, error) from error
        return members, dig(answer, "continue") or {}

    def _next_mark(self, mark: dict[str, Any], members: list[Any], go_on: dict[str, str]) -> dict[str, Any]:
        """The bookmark after a page of members: new subcategories join the queue, a finished category leaves it."""
        depth, seen, queue = mark["queue"][0][1], list(mark["seen"]), list(mark["queue"])
        for member in members:
            title = dig_text(member, "title")
            if dig(member, "ns") == CATEGORIES and depth < self.config.category_depth and title not in seen:
                seen.append(title)
                queue.append([title, depth + 1])
        return {"queue": queue if go_on else queue[1:], "seen": seen, "continue": go_on}

    def _ask(self, context: ApiContext, parameters: dict[str, Any], gate: Gate) -> Any:
        """One answer; a busy server says so with status 200 and Retry-After, and is asked again later."""
        fetcher = context.fetcher
        for attempt in range(fetcher.config.retries + 1):
            busy_gate = gate if attempt == 0 else LISTING_GATE  # the stored answer is that the server was busy
            page = fetch_api(fetcher, self.api, "", parameters, busy_gate)
            answer = parse_json(page)
            code = dig_text(answer, "error", "code")
            if not code:
                return answer
            if code not in BUSY:
                raise FetchError("api_error", f"{code}: {dig_text(answer, 'error', 'info')}")
            wait_s = retry_after_s(page.headers.get("retry-after", "5"), fetcher.clock.wall_s())
            fetcher.pace.hold(self.api.host, 5.0 if wait_s is None else min(wait_s, fetcher.config.max_wait_s))
        raise FetchError("api_busy", code)

    def _article(self, context: ApiContext, title: str) -> Outcome:
        item = Item(self._key(title), self.name)
        parameters = {"prop": "extracts|info", "explaintext": 1, "exsectionformat": "wiki", "inprop": "url"}
        try:
            answer = self._ask(context, parameters | {"redirects": 1, "titles": title}, API_GATE)
        except FetchError as error:
            return Outcome(item, error.reason, error.detail)
        page = dig(answer, "query", "pages", 0)
        if page is None or dig(page, "missing") or dig(page, "invalid"):
            return Outcome(item, "missing", title)
        text = clean_extract(dig_text(page, "extract"))
        if len(text) < self.config.min_characters:
            return Outcome(item, "too_short", f"{len(text)} characters")
        document = Document(
            id=f"wikipedia:{self.config.language}:{dig(page, 'pageid')}",
            source=self.name,
            text=text,
            title=dig_text(page, "title"),
            url=dig_text(page, "fullurl"),
            date=dig_text(page, "touched")[:10],
            meta={"language": self.config.language, "revision": dig(page, "lastrevid"), "license": "CC BY-SA 4.0"},
        )
        return Outcome(item, KEPT, "", [document])


def read_heading(line: str) -> tuple[int, str]:
    """(level, title) of a line such as "== Causes ==", (0, "") of any other."""
    line = line.strip()
    if len(line) > MAX_HEADING_CHARACTERS or not line.startswith("=="):
        return 0, ""
    title = line.strip("=")
    level = len(line) - len(line.lstrip("="))
    return (level, title.strip()) if title.strip() and line.endswith("=" * level) else (0, "")


def clean_extract(text: str) -> str:
    """Wiki headings as plain lines; those with nothing below them (references, links, galleries) are taken out."""
    kept: list[str] = []
    open_headings: list[tuple[int, str]] = []  # headings that no text has followed yet
    for line in text.split("\n"):
        level, heading = read_heading(line)
        if level:
            open_headings = [entry for entry in open_headings if entry[0] < level]
            open_headings.append((level, heading))
        elif line.strip():
            for _, heading in open_headings:
                kept += ["", heading] if kept and kept[-1] else [heading]
            open_headings = []
            kept.append(line.rstrip())
        elif kept and kept[-1] and not open_headings:
            kept.append("")
    return "\n".join(kept).strip("\n")
