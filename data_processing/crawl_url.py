"""URLs in one spelling, and the hosts that a crawl may talk to.

Two spellings of one page must be one key, or a crawl fetches it twice; RFC 3986 section 6 says which changes keep the
meaning. The result is ASCII without user names, fragments or dot segments, so that every later reader (httpx, the
robots rules, the cache) sees the same host and path. Order and case of query parameters stay: they may matter.
"""

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

from configs.errors import UserError

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_URL_CHARACTERS = 8000  # the signed addresses of storage services have two thousand
TRACKING_PARAMETERS = ("utm_*", "fbclid", "gclid", "mc_cid", "mc_eid", "phpsessid", "jsessionid", "sessionid")
HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
TRIPLET = re.compile(r"%[0-9A-Fa-f]{2}")
STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
PATH_SAFE = "/%:@!$&'()*+,;=~"
QUERY_SAFE = PATH_SAFE + "?"


def normalise_url(url: str, base: str = "", drop_parameters: Iterable[str] = TRACKING_PARAMETERS) -> str | None:
    """The one spelling of an http(s) URL, resolved against `base`; None for anything that is no such URL.

    A name in `drop_parameters` (or a prefix that ends in *) is taken out of the query: marks of campaigns and
    sessions do not name another page.
    """
    if len(url) > 2 * MAX_URL_CHARACTERS:  # data: URIs of megabytes are not worth the work
        return None
    # Browsers drop tabs and line ends inside a URL and read "\" as "/"; urllib does neither, so it is done first.
    url = re.sub(r"[\t\r\n]", "", url.strip()).split("#", 1)[0].replace("\\", "/")
    try:
        parts = urlsplit(urljoin(base, url) if base else url)
        host, port = _normalise_host(parts.hostname or ""), parts.port
    except ValueError:  # a port or an IPv6 address that is none
        return None
    scheme = parts.scheme.lower()
    if scheme not in DEFAULT_PORTS or not host or "@" in parts.netloc or port == 0:
        return None
    netloc = host if port in (None, DEFAULT_PORTS[scheme]) else f"{host}:{port}"
    path = remove_dot_segments(normalise_escapes(parts.path, PATH_SAFE)) or "/"
    query = _kept_parameters(normalise_escapes(parts.query, QUERY_SAFE), drop_parameters)
    result = f"{scheme}://{netloc}{path}" + (f"?{query}" if query else "")
    return result if len(result) <= MAX_URL_CHARACTERS else None


def _normalise_host(host: str) -> str | None:
    """Lower case, punycode, no trailing dot; IPv6 in brackets and its shortest form; None if it is no host."""
    if ":" in host:
        return f"[{ipaddress.IPv6Address(host).compressed}]"
    host = host.rstrip(".").lower()
    if not host.isascii():
        try:
            host = host.encode("idna").decode("ascii")
        except UnicodeError:
            return None
    return host if HOST_NAME.fullmatch(host) else None


def normalise_escapes(text: str, safe: str) -> str:
    """Percent escapes in one form: needless ones decoded, the rest in upper case, missing ones added."""

    def one(match: re.Match) -> str:
        byte = unquote_to_bytes(match.group())[0]
        return chr(byte) if byte in UNRESERVED else match.group().upper()

    return quote(TRIPLET.sub(one, STRAY_PERCENT.sub("%25", text)), safe=safe)


def remove_dot_segments(path: str) -> str:
    """The path without "." and ".." (RFC 3986 section 5.2.4), as urljoin does it only for relative URLs."""
    kept: list[str] = []
    segments = path.split("/")
    for segment in segments[1:]:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", "..") and len(segments) > 1:
        kept.append("")
    return "/" + "/".join(kept)


def _kept_parameters(query: str, drop: Iterable[str]) -> str:
    names = {name.lower() for name in drop}
    prefixes = tuple(name[:-1] for name in names if name.endswith("*"))

    def stays(parameter: str) -> bool:
        name = parameter.split("=", 1)[0].lower()
        return bool(parameter) and name not in names and not (prefixes and name.startswith(prefixes))

    return "&".join(parameter for parameter in query.split("&") if stays(parameter))


def host_of(url: str) -> str:
    """The host of a normalised URL, without port and brackets."""
    return urlsplit(url).hostname or ""


def origin_of(url: str) -> str:
    """Scheme, host and port of a normalised URL: what one robots.txt speaks for."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def url_key(url: str) -> str:
    """What stands for the URL in file names: a hash, never a part of the URL itself (32 hex digits)."""
    return hashlib.sha256(url.encode("utf-8")).hexdigest()[:32]


class AllowedHosts:
    """The hosts that may be asked: names ("example.org"), names with all below them ("*.example.org"), or "*"."""

    def __init__(self, patterns: Iterable[str]):
        self.exact: set[str] = set()
        self.parents: set[str] = set()
        for pattern in patterns:
            wildcard, name = pattern.startswith("*."), pattern.removeprefix("*.").lower().rstrip(".")
            if pattern != "*" and not (HOST_NAME.fullmatch(name) or _is_address(name)):
                raise UserError(f"allowed host {pattern!r} is no host name; use example.org, *.example.org or '*'")
            self.exact.add(name)
            if wildcard:
                self.parents.add(name)

    def allows(self, host: str) -> bool:
        if "*" in self.exact or host in self.exact:
            return True
        labels = host.split(".")
        return any(".".join(labels[start:]) in self.parents for start in range(1, len(labels)))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
