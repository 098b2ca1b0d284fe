"""What a request may take, and what a client is told when it takes more.

In: numbers from the command line, a key, the time. Out: nothing, or a `Refusal`, which becomes the JSON answer
`{"error": {"message", "type", "param", "code"}}` with its status.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from litchi.errors import UsageError

KEYS = "LITCHI_API_KEYS"


class Refusal(Exception):
    """A request that is not answered as it was meant. Says why, never how the server is made.

    Args:
        status: of HTTP.
        code: a stable word.
        message: for people.
        param: the field of the request, where it is one.
        retry_s: after how many seconds it may be sent again.
        close: whether the connection is closed behind the answer, because not all of the request was read.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_s: float | None = None,
        close: bool = False,
    ):
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry_s, self.close = retry_s, close
        super().__init__(message)

    def __reduce__(self):  # some come out of the model's process
        return _refusal, (self.status, self.code, self.message, self.param, self.retry_s, self.close)

    @property
    def kind(self) -> str:
        """The family of the error, as OpenAI names them."""
        named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return named.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """When to come again, how to authenticate, whether the connection closes."""
        out = {} if self.retry_s is None else {"retry-after": str(max(1, round(self.retry_s + 0.5)))}
        if self.status == 401:
            out["www-authenticate"] = "Bearer"
        return out | ({"connection": "close"} if self.close else {})


def _refusal(status, code, message, param, retry_s, close):
    return Refusal(status, code, message, param=param, retry_s=retry_s, close=close)


def read_keys(path: str | None) -> frozenset[str]:
    """Digests of the keys that may be used: a file with one on each line, and the environment, comma-separated.

    Raises:
        UsageError: the file cannot be read, or has no key.
    """
    keys = [key.strip() for key in os.environ.get(KEYS, "").split(",")]
    if path is not None:
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {path} cannot be read", why=str(error)) from None
        listed = [line for line in lines if line and not line.startswith("#")]
        if not listed:
            raise UsageError(f"--api-key-file {path} has no key", remedy="Write one on each line")
        keys += listed
    return frozenset(digest(key) for key in keys if key)


def digest(key: str) -> str:
    """What a key is kept and compared as: the time of a comparison then says nothing about the key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


@dataclass
class Caller:
    """One key or address: its requests at work, and the tokens in its bucket."""

    running: int = 0
    allowance: float = 0.0
    seen_s: float = 0.0


@dataclass
class Gate:
    """Lets a key in, or refuses it: 401 without a known key, 429 above its rate or concurrency."""

    keys: frozenset[str]
    rate: float | None = None
    concurrency: int | None = None
    clock: Callable[[], float] = monotonic
    callers: dict[str, Caller] = field(default_factory=dict)

    def enter(self, authorization: str | None, address: str) -> str:
        """Let a request in; returns who it counts for, to be given to `leave`. Raises Refusal."""
        who = address
        if self.keys:
            scheme, _, key = (authorization or "").partition(" ")
            who = digest(key.strip())
            if scheme.lower() != "bearer" or who not in self.keys:
                raise Refusal(401, "invalid_api_key", "an API key is needed: Authorization: Bearer KEY")
        self._forget()
        caller = self.callers.setdefault(who, Caller(allowance=self._burst))
        now = self.clock()
        if self.rate is not None:
            if caller.seen_s:
                caller.allowance = min(self._burst, caller.allowance + (now - caller.seen_s) * self.rate)
            caller.seen_s = now
            if caller.allowance < 1:
                wait_s = (1 - caller.allowance) / self.rate
                raise Refusal(429, "rate_limit", f"more than {self.rate:g} requests a second", retry_s=wait_s)
        if self.concurrency is not None and caller.running >= self.concurrency:
            raise Refusal(429, "concurrency_limit", f"{self.concurrency} requests are at work already", retry_s=1)
        caller.allowance -= 1
        caller.running += 1
        return who

    def leave(self, who: str) -> None:
        """A request has ended."""
        self.callers[who].running -= 1

    @property
    def _burst(self) -> float:
        return max(1.0, self.rate or 1.0)

    def _forget(self) -> None:
        """Addresses that have not been seen for a while are dropped, so that they do not add up."""
        if len(self.callers) > 10_000:
            now = self.clock()
            old = [who for who, c in self.callers.items() if not c.running and now - c.seen_s > 60]
            for who in old:
                del self.callers[who]
