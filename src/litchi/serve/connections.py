"""Connections that do not wait for ever, and a stop that lets running requests finish.

uvicorn's server and protocol, with what they leave open: a client that sends its headers slowly is cut off, the
number of connections is limited, and a signal ends the process with status 0 once running requests are answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from litchi.config.serve import Serve
from litchi.errors import MachineError
from litchi.serve.limits import Refusal

BACKLOG = 128


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket on which connections will be taken. Raises MachineError when the place is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        raise MachineError(
            f"cannot listen on {host}:{port}", why=str(error), remedy="Choose another with --host and --port"
        ) from None
    found.setblocking(False)
    return found


def make_protocol(limits: Serve) -> type[H11Protocol]:
    """uvicorn's protocol under these limits."""

    class LimitedProtocol(H11Protocol):
        waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self.turn_away(Refusal(503, "overloaded", "too many connections", retry_s=1))
            else:
                self.waiting = self.loop.call_later(limits.arrival_s, self.cut_off)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            at_work = self.cycle is not None and not self.cycle.response_complete
            if at_work:
                self.stop_waiting()
            elif self.waiting is None:  # the beginning of a further request
                self.waiting = self.loop.call_later(limits.arrival_s, self.cut_off)

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_waiting()
            super().connection_lost(exc)

        def stop_waiting(self) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None

        def cut_off(self) -> None:
            self.turn_away(Refusal(408, "timeout", f"no request came within {limits.arrival_s:g} s"))

        def turn_away(self, refusal: Refusal) -> None:
            if not self.transport.is_closing():
                self.transport.write(raw_answer(refusal))
                self.transport.close()

    return LimitedProtocol


def raw_answer(refusal: Refusal) -> bytes:
    """A refusal as bytes of HTTP, for a connection on which no request is at work."""
    body = json.dumps(refusal.to_json()).encode()
    lines = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    reason = {408: "Request Timeout", 503: "Service Unavailable"}[refusal.status]
    head = "".join(f"{name}: {value}\r\n" for name, value in (lines | {"connection": "close"}).items())
    return f"HTTP/1.1 {refusal.status} {reason}\r\n{head}\r\n".encode() + body


class Server(uvicorn.Server):
    """uvicorn's server that a signal ends with grace: the second one ends it at once."""

    def __init__(self, app: Any, limits: Serve, stopping: Callable[[], None]):
        for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the access log says what there is to say
        super().__init__(
            uvicorn.Config(
                app,
                http=make_protocol(limits),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(limits.arrival_s),
                timeout_graceful_shutdown=max(1, round(limits.grace_s)),
            )
        )
        self.stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise a signal again when all is done, so that the process does not end with status 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.end)
        yield
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def end(self) -> None:
        """Stop taking connections and finish what runs; called again, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopping()
