"""Pictures of other machines, where `--allow-host` names them: https only, each hop checked, address pinned.

A URL's host must be one of the allowed ones, letter by letter; its addresses are looked up once, all of them must be
public ones, and the connection goes to one of these and to no other, whatever a second look-up would say. A redirect
is a new hop under the same rules. Without allowed hosts nothing is looked up and nothing is fetched.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from litchi.serve.limits import Refusal

HOPS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
NOTHING: frozenset[str] = frozenset()

Resolve = Callable[[str, int], list[str]]


def look_up(host: str, port: int) -> list[str]:
    """Addresses of a host."""
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet: neither this machine nor its network nor a cloud's metadata."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None)
    open_net = parsed.is_global and not parsed.is_multicast and not parsed.is_reserved  # ::/8 holds other forms of IPv4
    return open_net and (mapped is None or is_public(str(mapped)))


@dataclass(frozen=True)
class Fetcher:
    """Fetches from allowed hosts.

    Args:
        hosts: names that may be fetched from.
        limit_bytes: of one file, and of all of a request.
        limit_s: for all pictures of a request, all hops together.
        resolve, context: replaced by tests, which have no public address.
    """

    hosts: frozenset[str] = NOTHING
    limit_bytes: int = 2**25
    limit_s: float = 10.0
    resolve: Resolve = look_up
    public: Callable[[str], bool] = is_public
    context: ssl.SSLContext | None = None
    port: int = 443

    def fetch(self, url: str, name: str, deadline: float | None = None) -> bytes:
        """The bytes behind a URL. Raises Refusal; `name` is the field it stands in."""
        deadline = time.monotonic() + self.limit_s if deadline is None else deadline
        for _ in range(HOPS):
            found = self._hop(url, name, deadline)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise Refusal(400, "remote_media", f"{name}: more than {HOPS} redirects", param=name)

    def check(self, url: str, name: str) -> tuple[str, str]:
        """Host and path of a URL that may be fetched. Raises Refusal."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port, parts = "", None, urlsplit("")
        allowed = parts.scheme == "https" and host in self.hosts and port in (None, 443) and "@" not in parts.netloc
        if not allowed or any(ord(letter) < 33 or ord(letter) > 126 for letter in url):
            raise Refusal(400, "remote_media", f"{name}: this URL is not fetched. Send the picture itself", param=name)
        return host, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _hop(self, url: str, name: str, deadline: float) -> bytes | str:
        host, path = self.check(url, name)
        try:
            addresses = self.resolve(host, self.port)
            if not addresses or not all(self.public(address) for address in addresses):
                raise Refusal(400, "remote_media", f"{name}: {host} has no public address", param=name)
            connection = _Pinned(host, addresses[0], self.port, self.context, deadline)
            cut_off = threading.Timer(max(0.0, deadline - time.monotonic()), connection.abort)
            cut_off.start()  # a host that sends a byte now and then never runs into a socket's own timeout
            try:
                connection.request("GET", path, headers={"accept": "image/*", "user-agent": "litchi"})
                answer = connection.getresponse()
                if answer.status in REDIRECTS:
                    return answer.getheader("location") or ""
                if answer.status != 200:
                    raise Refusal(400, "remote_media", f"{name}: {host} answers {answer.status}", param=name)
                data = answer.read(self.limit_bytes + 1)
                if time.monotonic() >= deadline:  # what was cut off may look complete
                    raise TimeoutError
                if len(data) > self.limit_bytes:
                    raise Refusal(413, "media_too_large", f"{name}: more than {self.limit_bytes} bytes", param=name)
                return data
            finally:
                cut_off.cancel()
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            kind = type(error).__name__
            raise Refusal(400, "remote_media", f"{name}: {host} cannot be read ({kind})", param=name) from None


class _Pinned(http.client.HTTPSConnection):
    """A connection to one address, with the certificate of the host."""

    def __init__(self, host: str, address: str, port: int, context: ssl.SSLContext | None, deadline: float):
        context = context or ssl.create_default_context()
        super().__init__(host, port, timeout=max(0.1, deadline - time.monotonic()), context=context)
        self.address, self.tls = address, context
        self.opened: socket.socket | None = None

    def connect(self) -> None:
        plain = socket.create_connection((self.address, self.port), self.timeout)
        self.sock = self.opened = self.tls.wrap_socket(plain, server_hostname=self.host)

    def abort(self) -> None:
        """Let whoever reads from it get an error."""
        if self.opened is not None:  # `sock` is None once an answer without a length is read
            with suppress(OSError):
                self.opened.shutdown(socket.SHUT_RDWR)


def fetch_pictures(fetcher: Fetcher, fields: Any) -> None:
    """Put pictures in the place of their URLs, as data URLs. Raises Refusal."""
    deadline, total = time.monotonic() + fetcher.limit_s, 0
    for holder, key, name in remote_places(fields):
        data = fetcher.fetch(holder[key], name, deadline)
        total += len(data)
        if total > fetcher.limit_bytes:
            found = f"the pictures behind URLs have more than {fetcher.limit_bytes} bytes together"
            raise Refusal(413, "media_too_large", found, param=name)
        holder[key] = "data:application/octet-stream;base64," + base64.b64encode(data).decode()


def remote_places(fields: Any) -> Iterable[tuple[dict[str, Any] | list[Any], Any, str]]:
    """Where a body holds a picture by its URL: (container, key, name), for rerank, score and chat alike."""
    todo: list[tuple[Any, str]] = [(fields, "")]
    while todo:
        value, name = todo.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            where = f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}" if name else str(key)
            holds = where.rstrip("]0123456789[").endswith(("image", "image_url", "image_url.url"))
            if isinstance(inner, str) and holds and inner.startswith("https://"):
                yield value, key, where
            elif isinstance(inner, dict | list):
                todo.append((inner, where))
