"""Documents from the network: a polite crawl of web pages, or a source behind an API.

    python -m data_processing.crawl output=data/docs fetch.contact=you@example.org web.seeds=[https://docs.example.org/]
    python -m data_processing.crawl output=data/arxiv fetch.contact=you@example.org source=arxiv arxiv.query=cat:cs.CL

A killed crawl goes on by the same command, and a finished one with a larger budget. The documents go through
build_corpus (source=jsonl path=OUTPUT) like any others. crawl_fetch says what a request must pass.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.run_dir import write_json_atomic
from data_processing.crawl_address import Resolver, resolve
from data_processing.crawl_api import ApiContext, ApiSource
from data_processing.crawl_arxiv import ArxivConfig, ArxivSource
from data_processing.crawl_crossref import CrossrefConfig, CrossrefSource
from data_processing.crawl_eartharxiv import EarthArxivConfig, EarthArxivSource
from data_processing.crawl_fetch import FetchConfig, Fetcher
from data_processing.crawl_hf import HubConfig, HubSource
from data_processing.crawl_pace import Clock
from data_processing.crawl_page import PageCache
from data_processing.crawl_state import KEPT, CrawlState, Outcome
from data_processing.crawl_substack import SubstackConfig, SubstackSource
from data_processing.crawl_web import FAILURES, WebConfig, WebCrawl
from data_processing.crawl_wikipedia import WikipediaConfig, WikipediaSource
from data_processing.document import open_atomic

SOURCES = ("web", "crossref", "arxiv", "eartharxiv", "wikipedia", "substack", "hub")
# What may differ when a crawl goes on: how far and how fast, not what it consists of.
BUDGETS = ("max_pages", "max_papers", "concurrency", "host_failures")
EXAMPLES, HOSTS_SHOWN = 3, 50


@dataclass
class CrawlConfig:
    """The whole crawl; `source` chooses which of the groups below counts."""

    source: str = "web"
    output: str = "data/crawl"
    overwrite: bool = False  # true throws away the crawl that `output` holds, its cache included
    retry_failed: bool = False  # true asks once more for what failed by network, time or server
    max_documents: int = 0  # 0 is no limit
    shard_bytes: int = 100_000_000
    fetch: FetchConfig = field(default_factory=FetchConfig)
    web: WebConfig = field(default_factory=WebConfig)
    crossref: CrossrefConfig = field(default_factory=CrossrefConfig)
    arxiv: ArxivConfig = field(default_factory=ArxivConfig)
    eartharxiv: EarthArxivConfig = field(default_factory=EarthArxivConfig)
    wikipedia: WikipediaConfig = field(default_factory=WikipediaConfig)
    substack: SubstackConfig = field(default_factory=SubstackConfig)
    hub: HubConfig = field(default_factory=HubConfig)

    def __post_init__(self):
        check_choice("source", self.source, SOURCES)
        check_positive(shard_bytes=self.shard_bytes)
        if self.max_documents < 0:
            raise UserError(f"max_documents={self.max_documents} is negative; use 0 for no limit")


@dataclass
class Outside:
    """What a crawl takes from the world around it; tests put a clock and names of their own here."""

    clock: Clock = field(default_factory=Clock)
    resolver: Resolver = resolve


def build_api_source(config: CrawlConfig) -> ApiSource:
    """The API source that the config names. Raises UserError for settings that leave open what to fetch."""
    sources = {
        "crossref": CrossrefSource,
        "arxiv": ArxivSource,
        "eartharxiv": EarthArxivSource,
        "wikipedia": WikipediaSource,
        "substack": SubstackSource,
        "hub": HubSource,
    }
    return sources[config.source](getattr(config, config.source))


def identity_of(config: CrawlConfig) -> dict[str, Any]:
    """What makes two crawls the same one, so that the second goes on with the first."""
    settings = asdict(getattr(config, config.source))
    return {"source": config.source} | {name: value for name, value in settings.items() if name not in BUDGETS}


def crawl(config: CrawlConfig, outside: Outside | None = None) -> dict[str, Any]:
    """Crawl, or go on, until nothing is left or a budget is spent; returns the statistics (stats.json).

    Raises UserError for settings that make no sense, a listing that an API does not give, or an output directory that
    holds something else.
    """
    outside = outside or Outside()
    config.fetch.user_agent()
    source = None if config.source == "web" else build_api_source(config)
    hosts = config.web.hosts() if source is None else source.hosts()
    state = CrawlState(config.output, config.shard_bytes)
    fetcher = Fetcher(config.fetch, hosts, PageCache(state.cache_directory), outside.clock, outside.resolver)
    try:
        state.open(identity_of(config), config.overwrite)
        if config.retry_failed:
            state.retry([reason for reason in state.counts() if is_failure(reason)])
        with make_progress() as progress:
            counts = state.counts()
            done = sum(counts.values()) - counts.get("pending", 0)
            task = progress.add_task(config.source, total=None, done=done, kept=int(state.total("documents")))

            def show(outcome: Outcome) -> None:
                progress.update(task, advance=1, done=progress.tasks[task].fields["done"] + 1)
                progress.update(task, kept=int(state.total("documents")))

            if source is None:
                WebCrawl(config.web, fetcher, state, config.max_documents).run(show)
            else:
                run_api(source, ApiContext(fetcher, state.is_done, config.fetch.contact), state, config, show)
        state.finish()
        stats = collect_stats(config, state)
        write_json_atomic(state.output / "stats.json", stats)
        write_outcomes(state)
        return stats
    finally:
        state.close()
        fetcher.close()


def is_failure(reason: str) -> bool:
    """Whether an outcome may turn out better another time."""
    return reason in ("robots_unreachable", "host_given_up", "api_busy") or any(
        reason.removeprefix("unpaywall_") == name for name in FAILURES
    )


def run_api(
    source: ApiSource, context: ApiContext, state: CrawlState, config: CrawlConfig, show: Callable[[Outcome], None]
) -> None:
    """Commit batch after batch until the source ends or the document budget is spent."""
    # A second try looks through the lists from the start; what is done is passed over.
    bookmark = None if config.retry_failed else state.bookmark
    last = perf_counter()
    if config.max_documents and state.total("documents") >= config.max_documents:
        return
    for batch in source.batches(context, bookmark):
        now = perf_counter()
        state.commit(batch.outcomes, batch.bookmark, now - last)
        last = now
        for outcome in batch.outcomes:
            show(outcome)
        if config.max_documents and state.total("documents") >= config.max_documents:
            return


def collect_stats(config: CrawlConfig, state: CrawlState) -> dict[str, Any]:
    """Counts by outcome and host, with examples of each reason why something was not kept."""
    counts = state.counts()
    by_host = state.counts_by_host()
    largest = sorted(by_host, key=lambda host: -sum(by_host[host].values()))[:HOSTS_SHOWN]
    reasons = [name for name in counts if name not in (KEPT, "pending")]
    left = state.bookmark.get("left", {}) if isinstance(state.bookmark, dict) else {}
    return {
        "identity": identity_of(config),
        "documents": int(state.total("documents")),
        "bytes": int(state.total("bytes")),
        "seconds": round(state.total("seconds"), 3),
        "outcomes": counts,
        "hosts": {host: by_host[host] for host in largest},
        "examples": {reason: state.examples(reason, EXAMPLES) for reason in reasons},
        "journals_left": left,
    }


def write_outcomes(state: CrawlState) -> None:
    """_crawl/outcomes.jsonl.gz: what became of each page or paper, for looking it up."""
    with open_atomic(state.work / "outcomes.jsonl.gz") as file:
        for outcome in state.outcomes():
            file.write(json.dumps(outcome, ensure_ascii=False).encode("utf-8") + b"\n")


def make_progress() -> Progress:
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}: {task.fields[done]} done, {task.fields[kept]} documents"),
        TimeElapsedColumn(),
    ]
    return Progress(*columns, console=Console(stderr=True))


def print_summary(stats: dict[str, Any], output: str) -> None:
    """The outcomes, most frequent first, and where everything is."""
    table = Table("outcome", "items", "example")
    for reason, count in stats["outcomes"].items():
        example = next(iter(stats["examples"].get(reason, [])), {"key": "", "detail": ""})
        table.add_row(reason, str(count), f"{example['key']} {example['detail']}"[:100])
    console = Console()
    console.print(table)
    for issn, why in stats["journals_left"].items():
        console.print(f"journal {issn} was left: {why}")
    console.print(
        f"{stats['documents']} documents, {stats['bytes'] / 1e6:.2f} MB in {output}, {stats['seconds']:.0f} s"
        " (stats.json, _crawl/outcomes.jsonl.gz)",
        markup=False,
    )


def body(config: CrawlConfig) -> dict[str, Any]:
    """What the script does: crawl and print the summary."""
    try:
        stats = crawl(config)
    except KeyboardInterrupt:
        raise UserError(f"stopped; the same command goes on with {config.output}") from None
    print_summary(stats, config.output)
    return stats


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="crawl")
def main(config: DictConfig) -> None:
    run_script(body, CrawlConfig, config)


if __name__ == "__main__":
    start_script(main, CrawlConfig, "crawl")
