"""Decide which requests are answered, and with which headers: the data are untrusted, and so are other pages in the same browser."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

TOKEN = "token"  # noqa: S105  (the name of the parameter)
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content Security Policy of everything but downloads: scripts and styles of this package only, and no text becomes markup."""
DOWNLOAD_POLICY = "sandbox; default-src 'none'; frame-ancestors 'none'"
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_ANY = ("0.0.0.0", "::")  # noqa: S104  (compared with)
_NOT_SAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the server listens.

    Args:
        host: Address or name; 127.0.0.1 is for this machine alone.
        port: Port; 0 takes a free one.
        opens_browser: Open the page in the browser of this machine.
    """

    host: str = "127.0.0.1"
    port: int = 0
    opens_browser: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The rules of one server.

    Args:
        token: The secret of the printed address.
        port: Port of the server.
        names: Names of this machine under which it may be called; addresses are always allowed.
    """

    token: str
    port: int
    names: frozenset[str] = frozenset({"localhost"})

    @property
    def cookie(self) -> str:
        """Name of the cookie; browsers send cookies to all ports of a host, so it has the port."""
        return f"shardstream-{self.port}"

    def refusal(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Return why a request is refused, before its token is looked at; None if it is not.

        Args:
            method: Method of the request.
            headers: Its headers, with names in lower case.
        """
        if method not in ("GET", "HEAD", "POST"):
            return f"{method} is not answered here"
        host = headers.get("host", "")
        if not self._knows(host):
            return f"this server is not called {host!r}; open the address that 'shardstream view' printed"
        # Other ports of this machine are "same-site": they are refused, too.
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "another page made this request; paste the address into the address bar"
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return "another page made this request"
        if method == "POST" and headers.get("content-type", "") != "application/json":
            return "a POST must be JSON"
        return None

    def is_token(self, given: str) -> bool:
        """Return whether a text is the token, in constant time."""
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _knows(self, host: str) -> bool:
        """Return whether a Host header names this server: DNS rebinding needs a name that we do not know."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port
        except ValueError:
            return False
        if port != self.port or parts.username is not None or "/" in host:
            return False
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def allowed_names(host: str, own: str) -> frozenset[str]:
    """Return the names under which a server at an address may be called.

    >>> sorted(allowed_names("127.0.0.1", "node7")), sorted(allowed_names("0.0.0.0", "node7"))
    (['localhost'], ['localhost', 'node7'])

    Args:
        host: Address or name that it listens at.
        own: Name of this machine.
    """
    names = {"localhost"}
    if host in _ANY:
        names.add(own.lower())
    elif not re.fullmatch(r"[0-9.]+|.*:.*", host):
        names.add(host.lower())
    return frozenset(names)


def download_name(key: str, field: str) -> str:
    r"""Return a file name for a field that every system and header accepts.

    >>> download_name("a/b \"c\"\n", "seg.png")
    'a_b__c__.seg.png'
    """
    return f"{_NOT_SAFE.sub('_', key)[:80]}.{_NOT_SAFE.sub('_', field)[:40]}".lstrip(".")


def parse_range(text: str | None, size: int, limit: int) -> tuple[int, int] | None:
    """Return start and end of the part that a player asks for; None for the whole.

    >>> parse_range("bytes=10-", 100, 1000), parse_range("bytes=-20", 100, 1000), parse_range(None, 5, 9)
    ((10, 100), (80, 100), None)
    >>> parse_range("bytes=0-", 5000, 1000)
    (0, 1000)

    Args:
        text: The Range header.
        size: Bytes of the field.
        limit: Maximum of the bytes that one response has.
    """
    found = re.fullmatch(r"bytes=(\d{0,15})-(\d{0,15})", (text or "").strip())
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    return start, min(end, start + limit)
