"""The front's side of the engines: which takes a request, what comes back, and what happens when one dies.

A job goes to the engine with the least to do, by what jobs take (`effort.py`). What comes through the pipes is handed
to the loop of the server; a request that nobody waits for any more is cancelled in its engine. An engine that dies is
started again, and its requests are refused with 503.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from litchi.config.serve import Serve
from litchi.errors import UserError
from litchi.serve.effort import Pace, effort
from litchi.serve.jobs import Answer, Facts, Job, Scores
from litchi.serve.limits import Refusal

RESTARTS = 5  # of an engine that dies within RESTART_S
RESTART_S = 600.0


@dataclass(eq=False)
class Ticket:
    """A request that an engine works on."""

    number: int
    effort: float
    engine: PooledEngine
    events: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text, as they come; `outcome` is set behind the last. Raises Refusal."""
        while True:
            kind, value = await self.events.get()
            if kind == "refused":
                raise value
            if kind == "done":
                self.outcome = value
                return
            yield value

    outcome: Scores | Answer | None = None

    async def wait(self) -> Scores | Answer:
        """What came out of it. Raises Refusal."""
        async for _ in self:
            pass
        assert self.outcome is not None
        return self.outcome


@dataclass(eq=False)
class PooledEngine:
    """One engine as the front sees it."""

    index: int
    process: Any = None
    pipe: Any = None
    outbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    facts: Facts | None = None
    tickets: dict[int, Ticket] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    busy_since_s: float = 0.0  # while it has tickets: when it answered the last one, or got the first
    served: bool = False
    deaths: list[float] = field(default_factory=list)

    @property
    def load(self) -> float:
        return sum(ticket.effort for ticket in self.tickets.values())

    def add(self, ticket: Ticket) -> None:
        if not self.tickets:
            self.busy_since_s = time.monotonic()
        self.tickets[ticket.number] = ticket

    def finish(self, ticket: Ticket) -> None:
        """A ticket was answered: what that took is known."""
        now = time.monotonic()
        self.pace.see(now - self.busy_since_s, ticket.effort)
        self.busy_since_s = now


class Pool:
    """Engines in processes of their own.

    Args:
        target: what such a process runs: (pipe, spec).
        spec: of each engine.
        count: how many.
        first: number of the first one: each has a number of its own, also beside those of another pool.
        say: for the log: a line about an engine.
        say_ready: all engines are.
        note: for the metrics: what an engine tells of a batch.
        fail: called when no engine can be had any more.
    """

    def __init__(
        self,
        target: Callable[..., None],
        spec: Any,
        count: int,
        limits: Serve,
        *,
        first: int = 0,
        say: Callable[[str], None],
        say_ready: Callable[[], None],
        note: Callable[[dict[str, Any]], None],
        fail: Callable[[UserError], None],
    ):
        self.target, self.spec, self.limits = target, spec, limits
        self.say, self.say_ready, self.note, self.fail = say, say_ready, note, fail
        self.engines = [PooledEngine(first + index) for index in range(count)]
        self.numbers = 0
        self.arriving = 0  # requests that are being parsed, and have their place already
        self.stopping = False
        self.context = multiprocessing.get_context("spawn")
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def ready(self) -> bool:
        return all(engine.facts is not None for engine in self.engines)

    @property
    def facts(self) -> Facts | None:
        return next((engine.facts for engine in self.engines if engine.facts is not None), None)

    @property
    def running(self) -> int:
        return sum(len(engine.tickets) for engine in self.engines)

    def start(self) -> None:
        """Start all engines; they are ready when they say so."""
        self.loop = asyncio.get_running_loop()
        for engine in self.engines:
            self._start(engine)

    def _start(self, engine: PooledEngine) -> None:
        here, there = self.context.Pipe()
        spec = replace(self.spec, device=engine.index)
        engine.process = self.context.Process(target=self.target, args=(there, spec), daemon=True)
        engine.pipe, engine.facts, engine.outbox = here, None, queue.SimpleQueue()
        engine.process.start()
        there.close()
        threading.Thread(target=self._listen, args=(engine, here), daemon=True).start()
        threading.Thread(target=_send_all, args=(engine.outbox, here), daemon=True).start()

    # ------------------------------------------------------------------------------------------------- requests

    def find_room(self) -> PooledEngine:
        """The engine a further request would go to. Raises Refusal where it would wait too long, or none is ready."""
        able = [engine for engine in self.engines if engine.facts is not None]
        if not able:
            raise Refusal(503, "not_ready", "the model is being loaded", retry_s=5)
        engine = min(able, key=lambda e: e.load)
        arriving = self.arriving / len(able)
        waiting, wait_s = len(engine.tickets) + arriving, engine.pace.effort_s * engine.load
        wait_s += engine.pace.request_s * arriving
        if waiting >= self.limits.queue or (waiting and wait_s > self.limits.queue_s):
            raise Refusal(503, "overloaded", "too many requests wait already", retry_s=max(wait_s, 1))
        return engine

    def submit(self, job: Job) -> Ticket:
        """Hand a job to the engine with the least to do. Raises Refusal."""
        engine = self.find_room()
        assert engine.facts is not None
        self.numbers += 1
        ticket = Ticket(self.numbers, effort(job, engine.facts.facts["pixels"]["max"]), engine)
        engine.add(ticket)
        engine.outbox.put(("job", ticket.number, job))
        return ticket

    def release(self, ticket: Ticket) -> None:
        """A request has ended; one that is still at work is cancelled."""
        if ticket.engine.tickets.pop(ticket.number, None) is not None:
            ticket.engine.outbox.put(("cancel", ticket.number))

    # ------------------------------------------------------------------------------------------------- messages

    def _listen(self, engine: PooledEngine, pipe: Any) -> None:
        """In a thread: hand on what an engine says, and at last that it is gone."""
        assert self.loop is not None
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                message = ("gone",)
            try:
                self.loop.call_soon_threadsafe(self._take, engine, pipe, message)
            except RuntimeError:  # the loop is closed: the server has ended
                return
            if message[0] == "gone":
                return

    def _take(self, engine: PooledEngine, pipe: Any, message: tuple[Any, ...]) -> None:
        if pipe is not engine.pipe:  # of an engine that was replaced
            return
        kind = message[0]
        if kind == "ready":
            engine.facts, engine.served = message[1], True
            for warning in message[2]:
                self.say(f"warning: {warning}")
            self.say(f"engine {engine.index} is ready: {message[1].name} on {message[1].facts['device']}")
            if self.ready:
                self.say_ready()
        elif kind == "failed":
            if engine.served:
                self.say(f"engine {engine.index}: {message[1].line()}")
            else:
                self.fail(message[1])
        elif kind == "stats":
            self.note({"engine": engine.index, **message[1]})
        elif kind == "gone":
            self._bury(engine)
        else:
            ticket = engine.tickets.get(message[1])
            if ticket is not None:
                if kind == "done":
                    engine.finish(ticket)
                if kind != "text":
                    del engine.tickets[message[1]]
                ticket.events.put_nowait((kind, message[2]))

    def _bury(self, engine: PooledEngine) -> None:
        engine.facts = None
        engine.outbox.put(None)
        for ticket in engine.tickets.values():
            found = "the model's process ended and is started again"
            ticket.events.put_nowait(("refused", Refusal(503, "engine_lost", found, retry_s=30)))
        engine.tickets.clear()
        if self.stopping:
            return
        if not engine.served:
            self.fail(_ended(engine, "ended while it was loading the model"))
            return
        now = time.monotonic()
        engine.deaths = [at for at in engine.deaths if now - at < RESTART_S] + [now]
        if len(engine.deaths) > RESTARTS:
            self.fail(_ended(engine, f"died {len(engine.deaths)} times in {RESTART_S:g} s"))
            return
        self.say(f"engine {engine.index} ended by itself, and is started again")
        self._start(engine)

    def stop(self) -> None:
        """End all engines; they hold nothing that has to be saved."""
        self.stopping = True
        for engine in self.engines:
            if engine.process is not None:
                engine.process.kill()
                engine.process.join()


def _ended(engine: PooledEngine, how: str) -> UserError:
    return UserError(
        f"engine {engine.index} {how}",
        why="mostly the system ends it when memory runs out, else it has said why above",
        remedy="Lower --procs or the limits of a request",
    )


def _send_all(outbox: queue.SimpleQueue[Any], pipe: Any) -> None:
    """In a thread: a pipe that is full must not hold up the server."""
    while (message := outbox.get()) is not None:
        try:
            pipe.send(message)
        except OSError:  # the engine is gone, which its listener says
            return
