"""The gate before every route: who may ask, what browsers may do with the page, and the count of answers.

A server on localhost is reachable by every page that a browser on this machine opens. So requests must name this
server in Host (a page cannot rebind its own name to us), must not carry another site's Origin, and bodies must be
declared as JSON, which a foreign page may not send without asking first.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm.serve_errors import ApiError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class GuardRules:
    """token: the bearer token of /v1 and /metrics, or None. hosts: names in Host that are ours; None: any."""

    token: str | None = None
    hosts: frozenset[str] | None = frozenset(LOCAL_NAMES)


class Guard:
    """ASGI middleware; `count(path, status)` is called once for each answer."""

    def __init__(self, app: ASGIApp, rules: GuardRules, count: Callable[[str, int], None]):
        self.app, self.rules, self.count = app, rules, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).update(SECURITY_HEADERS)
                self.count(scope["path"], message["status"])
            await send(message)

        error = self.refuse(scope)
        if error is not None:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)

    def refuse(self, scope: Scope) -> ApiError | None:
        """Why this request goes no further, or None."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.rules.hosts is not None and host_name(host) not in self.rules.hosts:
            return ApiError(403, f"Host {host[:200]!r} is not a name of this server; add it to allowed_hosts")
        origin = headers.get("origin")
        if origin is not None and urlsplit_netloc(origin) != host:
            return ApiError(403, f"Origin {origin[:200]!r} is another site; open this server's own page")
        if scope["method"] == "POST" and media_type(headers) != "application/json":
            return ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
        if scope["path"].startswith(("/v1/", "/metrics")) and not self.authorised(headers):
            return ApiError(
                401, "missing or wrong token; send the header Authorization: Bearer TOKEN", "invalid_api_key"
            )
        return None

    def authorised(self, headers: Headers) -> bool:
        if self.rules.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.rules.token.encode())


def host_name(host: str) -> str:
    """The name in a Host header, without its port: "[::1]:8000" -> "::1"."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def urlsplit_netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def hosts_of(host: str, allowed: list[str]) -> frozenset[str] | None:
    """The names that Host may hold for a server listening on `host`; None (any) where it listens on every address."""
    if host in ("0.0.0.0", "::") and not allowed:
        return None
    return frozenset({*LOCAL_NAMES, host.lower(), *(name.lower() for name in allowed)})
