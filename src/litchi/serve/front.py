"""What every request goes through: a number, the gate, the time it may take, a line in the log, the metrics."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi.responses import JSONResponse

from litchi.config.serve import Serve
from litchi.serve.fetch import Fetcher
from litchi.serve.limits import Gate, Refusal
from litchi.serve.metrics import Metrics
from litchi.serve.pool import Pool

PATHS = {"/v1/rerank": "rerank", "/v1/score": "rerank", "/v1/chat/completions": "chat"}  # and whom they are for
OPEN_PATHS = ("/health", "/metrics", "/openapi.json", "/v1/models")
OFTEN = ("/health", "/metrics")  # asked every few seconds: not in the log
INTERNAL = Refusal(500, "internal_error", "the server could not answer this request")


@dataclass
class Front:
    """Everything a request meets on its way. `pools` by the name of their model; the first is asked by default."""

    pools: dict[str, Pool]
    limits: Serve
    gate: Gate
    fetcher: Fetcher
    metrics: Metrics
    stopping: bool = False
    held_bytes: int = 0  # of requests that are read or at work
    turned_away: int = 0  # in the last second, unread

    @property
    def ready(self) -> bool:
        return all(pool.ready for pool in self.pools.values())

    def pick(self, model: str | None) -> tuple[str, Pool]:
        """The model a request names, or the first: clients send all kinds of names."""
        name = model if model in self.pools else next(iter(self.pools))
        return name, self.pools[name]

    def check_room(self) -> None:
        """Refuse a request that no model has room for. Raises Refusal."""
        found = None
        for pool in self.pools.values():
            try:
                pool.find_room()
                return
            except Refusal as refusal:
                found = found or refusal
        raise found or INTERNAL

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for a request while it is parsed: no more are than there is room for. One whose body is still on its
        way has none, or slow clients would keep others out. Raises Refusal."""
        self.check_room()
        for pool in self.pools.values():
            pool.arriving += 1
        try:
            yield
        finally:
            for pool in self.pools.values():
                pool.arriving -= 1

    def turn_away(self, target: bytes) -> Refusal | None:
        """Why a request is refused before it is read, in a flood of them; None: it is let in."""
        path = target.partition(b"?")[0].decode("latin-1")
        if path not in PATHS:
            return None
        try:
            self.check_room()
        except Refusal as refusal:
            self.metrics.see_request(path, refusal.status, 0.0, None)
            if not self.turned_away:  # a line for each would be a flood too
                asyncio.get_running_loop().call_later(1, self._say_turned_away)
            self.turned_away += 1
            return refusal
        return None

    def _say_turned_away(self) -> None:
        write_log(event=f"{self.turned_away} requests were refused unread within a second")
        self.turned_away = 0


def write_log(**facts: Any) -> None:
    """A line of JSON on stderr."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"time": now, **facts}, ensure_ascii=False), file=sys.stderr, flush=True)


def refuse(refusal: Refusal) -> JSONResponse:
    """The answer a refusal is."""
    return JSONResponse(refusal.to_json(), refusal.status, headers=refusal.headers)


class Watch:
    """Around every request: a number, the gate, the time it may take, a line in the log, the metrics."""

    def __init__(self, app: Any, front: Front):
        self.app, self.front = app, front

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        front, began = self.front, time.monotonic()
        note: dict[str, Any] = {}
        number = uuid.uuid4().hex[:16]
        scope["state"] = {**scope.get("state", {}), "note": note, "number": number}
        status = 0

        async def tell(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        path, who = scope["path"], None
        try:
            async with asyncio.timeout(front.limits.request_s):
                try:
                    if path in PATHS or path == "/v1/models":
                        who = self._enter(scope)
                    await self.app(scope, receive, tell)
                except Refusal as refusal:
                    await self._refuse(refusal, note, status, scope, receive, tell)
                except Exception:
                    traceback.print_exc()
                    await self._refuse(INTERNAL, note, status, scope, receive, tell)
        except TimeoutError:
            late = Refusal(503, "timeout", f"not answered within {front.limits.request_s:g} s", retry_s=5, close=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._refuse(late, note, status, scope, receive, tell)
        finally:
            if who is not None:
                front.gate.leave(who)
            front.held_bytes -= note.get("bytes", 0)
            self._note(scope, number, who, status, time.monotonic() - began, note)

    def _enter(self, scope: Any) -> str:
        front = self.front
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        who = front.gate.enter(authorization, address_of(scope))
        if front.stopping:
            front.gate.leave(who)
            raise Refusal(503, "stopping", "the server is stopping", retry_s=5, close=True)
        return who

    async def _refuse(self, refusal: Refusal, note: dict[str, Any], status: int, *asgi: Any) -> None:
        note["error"] = refusal.code
        if status == 0:  # nothing has been sent yet
            await refuse(refusal)(*asgi)

    def _note(self, scope: Any, number: str, who: str | None, status: int, took_s: float, note: dict[str, Any]) -> None:
        """A line in the log, and in the metrics."""
        path, keys = scope["path"], self.front.gate.keys
        known = path if path in PATHS or path in OPEN_PATHS else "other"
        self.front.metrics.see_request(known, status, took_s, note.get("waited_s"))
        if path in OFTEN and status in (200, 503):
            return
        caller = {"client": address_of(scope)} | ({"key": who[:8]} if who is not None and keys else {})
        asked = {"method": scope["method"], "path": path[:200], "status": status, "seconds": round(took_s, 4)}
        write_log(id=number, **caller, **asked, **note)


def address_of(scope: Any) -> str:
    """Where a request comes from."""
    return (scope.get("client") or ("",))[0]
