"""Which network addresses a crawl may connect to: public ones, and those that the user names.

A link on a foreign page must not reach what only this machine can reach (server-side request forgery). Names prove
nothing, so the check is on the address, after the name is resolved, and crawl_transport connects to the very address
that was checked: a name that resolves to something else a moment later (DNS rebinding) changes nothing.
"""

import ipaddress
import socket
from collections.abc import Callable, Iterable

from configs.errors import UserError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], list[str]]  # (host, port) -> addresses, most wanted first
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # its last four bytes are an IPv4 address that a gateway will reach


class AddressRefused(Exception):
    """The host has an address that is not public; the message names both."""


def resolve(host: str, port: int) -> list[str]:
    """The addresses that the system gives for a host, in its order, each once. Raises OSError (socket.gaierror)."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))


def inner_address(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for (mapped, 6to4, Teredo, NAT64), else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or address


def is_public(address: Address) -> bool:
    """Whether the address is one of the open Internet: not private, loopback, link-local, shared or multicast."""
    address = inner_address(address)
    return address.is_global and not address.is_multicast and not address.is_reserved


class AddressPolicy:
    """Resolves a host and refuses it unless each of its addresses is public or within `allowed` networks."""

    def __init__(self, allowed: Iterable[str] = (), resolver: Resolver = resolve):
        self.resolver = resolver
        try:
            self.allowed = [ipaddress.ip_network(network) for network in allowed]
        except ValueError as error:
            raise UserError(f"allow_addresses: {error}; use networks such as 127.0.0.0/8 or 10.1.2.3/32") from error

    def checked_addresses(self, host: str, port: int) -> list[str]:
        """The addresses to connect to. One bad address refuses the host: no honest name mixes both kinds.

        Raises AddressRefused, or OSError when the name does not resolve.
        """
        addresses = self.resolver(host, port)
        for text in addresses:
            address = ipaddress.ip_address(text)
            named = any(address.version == network.version and address in network for network in self.allowed)
            if not named and not is_public(address):
                raise AddressRefused(f"{host} resolves to {text}, which is not public; allow_addresses can name it")
        return addresses
