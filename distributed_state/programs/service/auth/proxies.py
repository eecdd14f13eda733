"""Proxies that authenticate for us. Law: what a header says of a caller counts if a named address sent it, else never.

By the address of the connection itself, not by one that `X-Forwarded-For` names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.requests import Request

from distributed_state.errors import ConfigurationError, InvalidValue, Unauthenticated
from distributed_state.programs.service.callers import Caller
from distributed_state.values.access_tokens import RIGHTS, prefix_of

ACTOR, TENANT, GRANTED = "x-actor", "x-tenant", "x-rights"
_ALL = "*"
_HOPS = 20


class Proxies:
    """The addresses and networks whose headers are believed."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        try:
            self._networks = [ipaddress.ip_network(each, strict=True) for each in networks]
        except ValueError as error:
            raise ConfigurationError(f"trust_proxy: {error}: give addresses or networks, as 10.0.0.0/8") from error

    def __bool__(self) -> bool:
        return bool(self._networks)

    def sent(self, request: Request) -> bool:
        """Whether one of them sent this request, and says whose it is."""
        if not self._networks or request.client is None or not self._has(request.client.host):
            return False
        return any(name in request.headers for name in (ACTOR, TENANT, GRANTED))

    def caller(self, request: Request) -> Caller:
        """Who it says has sent this request: `X-Tenant` (`*` is every one), `X-Rights`, and `X-Actor` if it names one.

        Raises Unauthenticated if one is missing, or there twice: then one of the two is from somebody else.
        """
        tenant, granted = _only(request, TENANT), _only(request, GRANTED)
        actor = _only(request, ACTOR) if ACTOR in request.headers else ""
        rights = {each.strip() for each in granted.split(",")}
        try:
            prefix = "" if tenant == _ALL else prefix_of(tenant)
        except InvalidValue as error:
            raise Unauthenticated from error
        if not rights <= set(RIGHTS):
            raise Unauthenticated
        return Caller(actor, prefix, frozenset(each for each in RIGHTS if each in rights))

    def client(self, request: Request) -> str:
        """The address of who sent the request: the last one of `X-Forwarded-For` that is no proxy of ours."""
        address = request.client.host if request.client else ""
        if not self._networks or not self._has(address):
            return address
        forwarded = ",".join(request.headers.getlist("x-forwarded-for")).split(",")[-_HOPS:]
        for each in reversed([hop.strip() for hop in forwarded if hop.strip()]):
            address = each[:100]
            if not self._has(address):
                break
        return address

    def _has(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None)  # an IPv4 peer of a socket that listens on both
        return any((mapped or found) in network for network in self._networks)


def _only(request: Request, name: str) -> str:
    values = request.headers.getlist(name)
    if len(values) != 1 or not values[0]:
        raise Unauthenticated
    return values[0].encode("latin-1").decode("utf-8", "replace")
