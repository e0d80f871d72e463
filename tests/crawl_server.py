"""A small web on the loopback interface: routes with real response shapes, failures included, and what was asked.

Names such as a.test lead to it through `resolver`; the fake clock lets waits pass without waiting.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from data_processing.crawl_fetch import FetchConfig
from data_processing.crawl_pace import Clock


@dataclass
class Reply:
    """What the server sends; `cut_at` closes the connection early, `drip_s` waits between single bytes."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    drip_s: float = 0.0


@dataclass
class Asked:
    """One request as the server saw it."""

    host: str
    path: str  # with the query
    headers: dict[str, str]

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))


Route = Reply | list[Reply] | Callable[[Asked], Reply]  # a list: one reply after the other, the last one stays


def html(body: str, title: str = "A page", head: str = "") -> Reply:
    text = f"<!doctype html><html><head><title>{title}</title>{head}</head><body>{body}</body></html>"
    return Reply(text.encode("utf-8"), headers={"Content-Type": "text/html; charset=utf-8"})


def json_reply(value: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(json.dumps(value).encode("utf-8"), status, {"Content-Type": "application/json"} | headers)


def make_pdf(pages: list[str]) -> bytes:
    """A whole PDF of text pages, lines broken at 80 characters."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        lines = [text[start : start + 80] for start in range(0, len(text), 80)]
        shown = " ".join(f"({line.replace('(', '').replace(')', '')}) Tj T*" for line in lines)
        stream = f"BT /F1 10 Tf 12 TL 40 780 Td {shown} ET".encode("latin-1")
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        content = len(objects)
        font = "/Resources << /Font << /F1 3 0 R >> >> /MediaBox [0 0 595 842]"
        objects.append(f"<< /Type /Page /Parent 2 0 R {font} /Contents {content} 0 R >>".encode())
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>".encode()
    body, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(body))
    return body + b"xref\n0 %d\n0000000000 65535 f \n" % size + table + trailer


def pdf(pages: list[str], content_type: str = "application/pdf") -> Reply:
    return Reply(make_pdf(pages), headers={"Content-Type": content_type})


class WebServer:
    """Routes by "host/path" or "/path"; a robots.txt that is not given is a 404."""

    def __init__(self):
        self.routes: dict[str, Route] = {}
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self.port = self._http.server_address[1]

    def url(self, path: str = "/", host: str = "a.test") -> str:
        return f"http://{host}:{self.port}{path}"

    def paths(self, robots: bool = False) -> list[str]:
        return [asked.path for asked in self.asked if robots or asked.path != "/robots.txt"]

    def reply_to(self, asked: Asked) -> Reply:
        name = urlsplit(asked.path).path
        with self._lock:
            self.asked.append(asked)
            route = self.routes.get(asked.host + asked.path) or self.routes.get(asked.host + name)
            route = route or self.routes.get(asked.path) or self.routes.get(name)
            if isinstance(route, list):
                route = route.pop(0) if len(route) > 1 else route[0]
        if route is None:
            return Reply(b"no such page", 404, {"Content-Type": "text/plain"})
        return route if isinstance(route, Reply) else route(asked)

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
                asked = Asked(host, self.path, {name.lower(): value for name, value in self.headers.items()})
                reply = server.reply_to(asked)
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                if reply.status != 304 and "Content-Length" not in reply.headers:
                    self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self._send_body(reply)

            def _send_body(self, reply: Reply):
                body = reply.body if reply.cut_at is None else reply.body[: reply.cut_at]
                try:
                    if reply.drip_s:
                        for byte in body:
                            self.wfile.write(bytes([byte]))
                            time.sleep(reply.drip_s)
                    elif reply.status != 304:
                        self.wfile.write(body)
                except OSError:
                    self.close_connection = True  # the crawler hung up, as it should
                if reply.cut_at is not None:
                    self.close_connection = True

            def log_message(self, *arguments):
                pass

        return Handler


@contextmanager
def serve() -> Iterator[WebServer]:
    """A running server for the length of a block."""
    server = WebServer()
    thread = threading.Thread(target=server._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._http.shutdown()
        server._http.server_close()


def resolver(host: str, port: int) -> list[str]:
    """Every name leads to this machine."""
    return ["127.0.0.1"]


class FakeTime:
    """A clock that jumps ahead instead of sleeping, and keeps the jumps."""

    def __init__(self):
        self.now, self.slept = 1000.0, []
        self._lock = threading.Lock()
        self.clock = Clock(lambda: self.now, lambda: 1_700_000_000 + self.now, self.wait)

    def wait(self, event: threading.Event, seconds: float) -> None:
        with self._lock:
            self.now += seconds
            self.slept.append(seconds)


def fetch_config(**settings: Any) -> FetchConfig:
    """Settings that reach the local server."""
    return FetchConfig(**{"contact": "test@example.org", "allow_addresses": ["127.0.0.0/8"]} | settings)
