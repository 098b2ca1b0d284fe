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
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from litchi.config.serve import Serve
from litchi.errors import MachineError
from litchi.serve.limits import Refusal

BACKLOG = 128
HEAD_BYTES = 2**16  # of a request


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


def make_protocol(limits: Serve, turn_away: Callable[[bytes], Refusal | None]) -> type[HttpToolsProtocol]:
    """uvicorn's protocol under these limits.

    Args:
        turn_away: why a POST to a path is refused before anything is made of it, or None. Its body is thrown away as
            it comes: under a flood a refusal costs a third to a seventh of what it would inside the application.
    """

    class LimitedProtocol(HttpToolsProtocol):
        waiting: asyncio.TimerHandle | None = None
        head_bytes: int | None = None  # of headers that are not complete
        unfinished = False  # a request has begun, and not come in full

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self.end(Refusal(503, "overloaded", "too many connections", retry_s=1))
            else:
                self.waiting = self.loop.call_later(limits.arrival_s, self.cut_off)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.head_bytes is not None:
                self.head_bytes += len(data)
                if self.head_bytes > HEAD_BYTES:
                    self.end(Refusal(431, "headers_too_large", f"more than {HEAD_BYTES} bytes of headers"))
            at_work = self.cycle is not None and not self.cycle.response_complete
            if at_work or not self.unfinished:
                self.stop_waiting()
            elif self.waiting is None:  # the beginning of a further request
                self.waiting = self.loop.call_later(limits.arrival_s, self.cut_off)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.head_bytes, self.unfinished = 0, True

        def on_headers_complete(self) -> None:
            self.head_bytes = None
            alone = self.cycle is None or self.cycle.response_complete
            refusal = turn_away(self.url) if alone and self.parser.get_method() == b"POST" else None
            if refusal is None:
                super().on_headers_complete()
                return
            keep = self.parser.should_keep_alive() and not self.expect_100_continue
            self.cycle = TurnedAway()  # type: ignore[assignment]  # what is asked of it
            self.transport.write(raw_answer(refusal, keep=keep))
            if not keep:
                self.transport.close()

        def on_message_complete(self) -> None:
            self.unfinished = False
            super().on_message_complete()
            if isinstance(self.cycle, TurnedAway):
                self.on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_waiting()
            super().connection_lost(exc)

        def stop_waiting(self) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None

        def cut_off(self) -> None:
            self.end(Refusal(408, "timeout", f"no request came within {limits.arrival_s:g} s"))

        def end(self, refusal: Refusal) -> None:
            if not self.transport.is_closing():
                self.transport.write(raw_answer(refusal))
                self.transport.close()

    return LimitedProtocol


class TurnedAway:
    """What uvicorn's protocol finds in place of a request that is answered already."""

    response_complete = True
    disconnected = False

    def __init__(self) -> None:
        self.message_event = asyncio.Event()


def raw_answer(refusal: Refusal, *, keep: bool = False) -> bytes:
    """A refusal as bytes of HTTP, for a connection on which no request is at work; `keep`: that stays open."""
    body = json.dumps(refusal.to_json()).encode()
    lines = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    lines |= {} if keep else {"connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n{head}\r\n".encode() + body


class Server(uvicorn.Server):
    """uvicorn's server that a signal ends with grace: the second one ends it at once."""

    def __init__(
        self,
        app: Any,
        limits: Serve,
        stopping: Callable[[], None],
        turn_away: Callable[[bytes], Refusal | None] = lambda target: None,
    ):
        for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the access log says what there is to say
        super().__init__(
            uvicorn.Config(
                app,
                http=make_protocol(limits, turn_away),
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
