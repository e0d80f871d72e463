"""The connection under every request: to an address that was checked, and never for longer than its deadline.

httpx resolves names inside its socket code, after any check that could be made outside; so the check is put there.
TLS still verifies the certificate against the host's name, and proxies of the environment are not used: a proxy would
resolve the name again. Imported only where a crawl runs, since httpx is an extra.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from data_processing.crawl_address import AddressPolicy

MAX_ADDRESSES = 4  # of one host that are tried before the connection counts as failed


class Deadline(threading.local):
    """When the request of this thread must be over, in seconds of time.monotonic."""

    at_s = float("inf")

    def start(self, seconds: float) -> None:
        self.at_s = time.monotonic() + seconds

    def remaining_s(self, timeout_s: float | None) -> float:
        """The time that the next operation may take; ReadTimeout when there is none left."""
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the whole response took too long")
        return left if timeout_s is None else min(left, timeout_s)


class DeadlineStream(httpcore.NetworkStream):
    """A stream whose reads and writes end with the deadline: a timeout per read alone never stops a slow drip."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline):
        self.stream, self.deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self.stream.read(max_bytes, self.deadline.remaining_s(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.stream.write(buffer, self.deadline.remaining_s(timeout))

    def close(self) -> None:
        self.stream.close()

    def start_tls(self, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        return DeadlineStream(self.stream.start_tls(*args, **kwargs), self.deadline)

    def get_extra_info(self, info: str) -> Any:
        return self.stream.get_extra_info(info)


class CheckedBackend(httpcore.NetworkBackend):
    """Opens connections to checked addresses only."""

    def __init__(self, policy: AddressPolicy, deadline: Deadline):
        self.policy, self.deadline, self.sockets = policy, deadline, httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            addresses = self.policy.checked_addresses(host, port)
        except OSError as error:
            raise httpcore.ConnectError(f"{host} does not resolve ({error})") from error
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                left = self.deadline.remaining_s(timeout)
                stream = self.sockets.connect_tcp(address, port, left, local_address, socket_options)
                return DeadlineStream(stream, self.deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class CheckedTransport(httpx.HTTPTransport):
    """httpx's transport over a pool with our backend; without cookies, proxies and redirects of its own."""

    def __init__(self, policy: AddressPolicy, timeout_s: float, max_connections: int = 100):
        self.deadline, self.timeout_s = Deadline(), timeout_s
        # HTTPTransport has no argument for a backend; its pool is all that its __init__ makes (httpx 0.27 and 0.28).
        self._pool = httpcore.ConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            max_connections=max_connections,
            keepalive_expiry=30.0,
            network_backend=CheckedBackend(policy, self.deadline),
        )

    def send(self, url: str, headers: dict[str, str], deadline_s: float) -> httpx.Response:
        """GET one URL and return its response with the body still to be read (close it).

        Raises httpx.TransportError (timeouts, broken connections) and AddressRefused.
        """
        self.deadline.start(deadline_s)
        timeout = httpx.Timeout(self.timeout_s).as_dict()
        request = httpx.Request("GET", url, headers=headers, extensions={"timeout": timeout})
        return self.handle_request(request)
