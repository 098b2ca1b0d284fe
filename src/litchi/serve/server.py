"""The HTTP front: who may ask, how much, and what is said back. The model is in other processes (`pool.py`).

POST /v1/rerank, /v1/score, /v1/chat/completions; GET /health, /v1/models, /metrics, /openapi.json, / (the playground)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from litchi import __version__
from litchi.config.serve import Serve
from litchi.errors import UserError
from litchi.serve import api
from litchi.serve.connections import Server, bind_socket
from litchi.serve.fetch import Fetcher, fetch_pictures
from litchi.serve.front import PATHS, Front, Watch, refuse, write_log
from litchi.serve.jobs import Answer, EngineSpec, ScoreJob, Scores
from litchi.serve.limits import Gate, Refusal
from litchi.serve.metrics import TYPE, Metrics
from litchi.serve.pages import HEADERS, read_pages
from litchi.serve.pool import Pool, Ticket
from litchi.serve.replies import chat_chunk, chat_reply, event, rerank_reply, score_reply, usage_chunk
from litchi.serve.requests import (
    Asked,
    ChatRequest,
    RerankRequest,
    parse_chat,
    parse_rerank,
    parse_score,
    read_body,
)

PARSE: dict[str, Callable[..., Asked]] = {
    "/v1/rerank": parse_rerank,
    "/v1/score": parse_score,
    "/v1/chat/completions": parse_chat,
}
LARGE_BYTES = 2**16  # what takes longer than that to parse is parsed in a thread
LOADING_S = 15.0
PLAYGROUND = ("playground.html", "playground.js", "page.css", "catalogue.json")
READ_ON = 4  # bodies up to so many times too large are read to their end, so that the client hears the answer


# ------------------------------------------------------------------------------------------------- one request


async def read_limited(front: Front, request: Request, note: dict[str, Any]) -> bytes:
    """The body, counted while it comes. Raises Refusal: 413 for too much of it, 408 for too slow a client."""
    limits, allowed = front.limits, front.limits.body_mb * 2**20
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "content_encoding", "compressed bodies are not read", close=True)
    too_large = Refusal(413, "body_too_large", f"more than {allowed} bytes", close=True)
    declared, total, body = int(request.headers.get("content-length", 0)), 0, bytearray()
    try:
        async with asyncio.timeout(limits.arrival_s):
            async for piece in request.stream():
                total += len(piece)
                if max(total, declared) <= allowed:
                    body += piece
                    front.held_bytes += len(piece)
                    note["bytes"] = total
                elif max(total, declared) > READ_ON * allowed:
                    raise too_large
                if front.held_bytes > limits.waiting_mb * 2**20:
                    raise Refusal(503, "overloaded", "too many large requests wait already", retry_s=2, close=True)
    except ClientDisconnect:
        raise client_gone() from None
    except TimeoutError:
        raise Refusal(408, "timeout", f"the body did not come within {limits.arrival_s:g} s", close=True) from None
    if total > allowed:
        raise too_large
    return bytes(body)


async def parse_body(front: Front, request: Request, note: dict[str, Any]) -> Asked:
    """What is asked for. Raises Refusal."""
    path = request.url.path
    raw = await read_limited(front, request, note)

    def parse() -> Asked:
        fields = read_body(raw)
        if front.fetcher.hosts:
            fetch_pictures(front.fetcher, fields)
        return PARSE[path](fields, front.limits)

    with front.place():
        if len(raw) <= LARGE_BYTES and not front.fetcher.hosts:
            return parse()
        return await asyncio.to_thread(parse)


async def answer(front: Front, request: Request) -> Response:
    """Read, ask, wait and reply. Raises Refusal."""
    path, note = request.url.path, request.state.note
    asked = await parse_body(front, request, note)
    name, pool = front.pick(asked.model)
    if pool.facts is not None and PATHS[path] not in pool.facts.tasks:
        found = f"{name} is served for {' and '.join(pool.facts.tasks)}, not for {PATHS[path]}"
        raise Refusal(400, "task_not_served", found)
    number = f"{PATHS[path]}-{request.state.number}"
    note |= {"model": name} if len(front.pools) > 1 else {}
    job = asked.job
    note |= {"documents": job.documents} if isinstance(job, ScoreJob) else {"max_tokens": job.max_tokens}
    ticket = pool.submit(job)
    if isinstance(asked, ChatRequest) and asked.stream:
        return await stream(pool, asked, ticket, note, name, number)
    try:
        outcome = await wait_for(ticket, request)
    finally:
        pool.release(ticket)
    note_work(note, outcome)
    if isinstance(outcome, Answer):
        assert isinstance(asked, ChatRequest)
        return JSONResponse(chat_reply(asked, outcome, name, number))
    if isinstance(asked, RerankRequest):
        return JSONResponse(rerank_reply(asked, outcome, name, number))
    assert not isinstance(asked, ChatRequest)
    return JSONResponse(score_reply(asked, outcome, name, number))


def note_work(note: dict[str, Any], outcome: Scores | Answer) -> None:
    """For the log: what an engine did for a request."""
    both = outcome.prompt_tokens + outcome.new_tokens if isinstance(outcome, Answer) else outcome.tokens
    note.update(tokens=both, waited_s=round(outcome.waited_s, 4), worked_s=round(outcome.worked_s, 4))


async def wait_for(ticket: Ticket, request: Request) -> Scores | Answer:
    """What comes out of a request, unless its client goes away. Raises Refusal, asyncio.CancelledError."""
    outcome = asyncio.ensure_future(ticket.wait())
    gone = asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait((outcome, gone), return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            raise client_gone()
        return outcome.result()
    finally:
        for task in (outcome, gone):
            task.cancel()


def client_gone() -> Refusal:
    """What the log says of a request whose client did not wait."""
    return Refusal(499, "client_gone", "the client has gone")


async def until_gone(request: Request) -> None:
    """Wait until the client has."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(
    pool: Pool, asked: ChatRequest, ticket: Ticket, note: dict[str, Any], name: str, number: str
) -> Response:
    """An answer piece by piece. What goes wrong before the first piece has a status of its own."""
    pieces = aiter(ticket)
    try:
        first = await anext(pieces, None)
    except BaseException:
        pool.release(ticket)
        raise

    async def events() -> AsyncIterator[str]:
        try:
            yield event(chat_chunk(name, number, {"role": "assistant", "content": ""}))
            if first is not None:
                yield event(chat_chunk(name, number, {"content": first}))
            async for text in pieces:
                yield event(chat_chunk(name, number, {"content": text}))
            found = ticket.outcome
            assert isinstance(found, Answer)
            note_work(note, found)
            yield event(chat_chunk(name, number, {}, found.reason))
            if asked.include_usage:
                yield event(usage_chunk(name, number, found))
            yield event("[DONE]")
        except Refusal as refusal:
            note["error"] = refusal.code
            yield event(refusal.to_json())
        finally:
            pool.release(ticket)

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def make_app(front: Front, start: Callable[[], None], end: Callable[[], None]) -> FastAPI:
    """The application: routes, forms, and what all requests go through."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        start()
        patience = asyncio.create_task(say_loading(front))
        yield
        patience.cancel()
        end()

    app = FastAPI(title="litchi serve", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Watch, front=front)

    def route(path: str, schema: dict[str, Any], summary: str) -> None:
        async def handle(request: Request) -> Response:
            return await answer(front, request)

        name = path.strip("/").replace("/", "_")
        app.add_api_route(
            path, handle, methods=["POST"], summary=summary, operation_id=name, name=name,
            responses=api.ANSWERS, openapi_extra=api.body(schema), response_class=JSONResponse,
        )  # fmt: skip

    route("/v1/rerank", api.RERANK, "Score documents against a query and rank them.")
    route("/v1/score", api.SCORE, "Score pairs of a query and a document.")
    route("/v1/chat/completions", api.CHAT, "Answer a conversation.")

    @app.get("/health")
    async def health() -> Response:
        """200 when every engine has passed its self check and the server is not stopping."""
        word = "stopping" if front.stopping else "ok" if front.ready else "loading"
        return JSONResponse({"status": word}, 200 if word == "ok" else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        """The model with what its scores depend on, and the one it is served beside."""
        data = []
        for name, pool in front.pools.items():
            model: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "litchi"}
            if pool.facts is not None:
                model |= {"tasks": list(pool.facts.tasks), **pool.facts.facts}
            data.append(model)
        return JSONResponse({"object": "list", "data": data})

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return PlainTextResponse(front.metrics.format(), headers={"content-type": TYPE})

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        return page("playground.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return page(name)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        known = {404: "there is nothing at this path: see /openapi.json", 405: "not with this method"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
        said = refuse(Refusal(error.status_code, code, known.get(error.status_code, str(error.detail))))
        said.headers.update(error.headers or {})
        return said

    return app


def page(name: str) -> Response:
    """A file of the playground. Raises HTTPException for a name that is none."""
    if name not in PLAYGROUND:
        raise HTTPException(404)
    body, kind = read_pages()[name]
    return Response(body, media_type=kind, headers=HEADERS)


async def say_loading(front: Front) -> None:
    """A large model takes minutes."""
    began = time.monotonic()
    while not front.ready:
        await asyncio.sleep(LOADING_S)
        if not front.ready:
            write_log(event=f"still loading after {time.monotonic() - began:.0f} s")


def run_server(
    target: Callable[..., None],
    specs: Sequence[EngineSpec],
    *,
    host: str,
    port: int,
    procs: int,
    limits: Serve,
    keys: frozenset[str],
    hosts: frozenset[str] = frozenset(),
) -> None:
    """Serve until a signal comes.

    Args:
        target: what an engine's process runs; see `Pool`.
        specs: of the engines of each model; the first is asked by default.
        port: 0 for any that is free.
        procs: engines of each model.
        keys: digests of the API keys; none: anyone may ask.
        hosts: that pictures may be fetched from.

    Raises:
        UserError: the port is taken, or the model cannot be opened.
    """
    listener = bind_socket(host, port)
    place = f"http://{host}:{listener.getsockname()[1]}"
    failed: list[UserError] = []

    def say_ready() -> None:
        if front.ready:
            write_log(event=f"serving {specs[0].name} on {place}")

    def say(text: str) -> None:
        write_log(event=text)

    def fail(error: UserError) -> None:
        failed.append(error)
        server.end()

    def stopping() -> None:
        front.stopping = True

    def start() -> None:
        for pool in pools.values():
            pool.start()

    def stop() -> None:
        for pool in pools.values():
            pool.stop()

    metrics = Metrics(lambda: sum(pool.running for pool in pools.values()))
    tell: dict[str, Any] = {"say": say, "say_ready": say_ready, "note": metrics.see_batch, "fail": fail}
    pools = {
        spec.name: Pool(target, spec, procs, limits, first=number * procs, **tell) for number, spec in enumerate(specs)
    }
    gate, fetcher = Gate(keys, limits.rate, limits.concurrency), Fetcher(hosts, limits.body_mb * 2**20)
    front = Front(pools, limits, gate, fetcher, metrics)
    server = Server(make_app(front, start, stop), limits, stopping, front.turn_away)
    if not keys and host not in ("127.0.0.1", "::1", "localhost"):
        write_log(event="warning: anyone who reaches this address may ask: no API keys are set")
    write_log(event=f"loading {' and '.join(pools)}")
    try:
        server.run(sockets=[listener])
    finally:
        stop()
        listener.close()
    if failed:
        raise failed[0]
    write_log(event="stopped")
