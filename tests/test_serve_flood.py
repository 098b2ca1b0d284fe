"""More than a server can take: who is let in, by what a request takes and not by their number; what refusing costs."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest
import serving
from rendering import draw
from serving import PIXELS

from litchi.config import load_config
from litchi.serve.effort import KEPT, Pace, effort, guess_pixels
from litchi.serve.jobs import ChatJob, EngineSpec, Facts, ScoreJob, Scores
from litchi.serve.limits import Refusal
from litchi.serve.pool import Pool
from litchi.types import ChatSample, Content, Document, Media, RerankSample, Source, Turn

HERE = Source("a request", 1)


def job(*documents, query="a hat"):
    made = tuple(Document(f"d{n}", content, 0.0) for n, content in enumerate(documents))
    return ScoreJob((RerankSample(HERE, "q", Content(query), made),), (tuple(d.id for d in made),))


def photograph(count, seed=0):
    return Content("", (Media("image", data=bytes([seed]) * count),))


# ---- What a request takes


def test_pixels_are_read_off_a_png_and_guessed_of_others(tmp_path):
    with open(draw(tmp_path / "a.png", 70, 30), "rb") as file:
        assert guess_pixels(file.read()) == 2100
    assert guess_pixels(b"\xff\xd8" + bytes(998)) == 4000 and guess_pixels(b"") == 0


def test_pictures_take_more_than_words_and_each_counts_once():
    words = effort(job(*[Content("a red hat of wool")] * 3), 784_000)
    assert words == (8 + 5 / 4) + 3 * (8 + 17 / 4)
    one = effort(job(photograph(500_000)), 784_000)
    assert one == pytest.approx(8 + 5 / 4 + 8 + 3 * 1000 + 2_000_000 / 8192)  # 2 million pixels, seen as 784,000
    assert effort(job(photograph(500_000), photograph(500_000)), 784_000) == one + 8
    assert effort(job(photograph(500_000), photograph(500_000, seed=1)), 784_000) > 1.9 * one
    turns = (Turn("user", ("What is it?", Media("image", data=bytes(400_000)))), Turn("assistant", ()))
    assert effort(ChatJob(ChatSample(HERE, "c", turns), 50), 784_000) == pytest.approx(
        50 + 8 + 11 / 4 + 3 * 1000 + 1_600_000 / 8192
    )


def test_the_pace_is_that_of_what_was_answered_lately():
    pace = Pace()
    assert pace.effort_s == pace.request_s == 0
    pace.see(2.0, 100)
    assert pace.effort_s == 0.02 and pace.request_s == 2
    for _ in range(400):  # half as long for ten times as much
        pace.see(1.0, 1000)
    assert pace.effort_s == pytest.approx(0.001, rel=1e-6) and pace.request_s == pytest.approx(1, rel=1e-6)
    assert pace.requests == pytest.approx(1 / (1 - KEPT), rel=1e-6)


# ---- Who is let in


def pool_of(count=1, **limits):
    words = [f"serve.{key}={value}" for key, value in limits.items()]
    nothing = lambda *_: None  # noqa: E731
    settings = load_config(None, ["task=rerank", *words], need=()).serve
    pool = Pool(nothing, EngineSpec("x"), count, settings, say=nothing, say_ready=nothing, note=nothing, fail=nothing)
    for engine in pool.engines:
        engine.facts = Facts("x", ("rerank",), {"pixels": {"max": 784_000}})
    return pool


def refused(pool, job):
    with pytest.raises(Refusal) as error:
        pool.submit(job)
    assert error.value.status == 503 and error.value.code == "overloaded" and error.value.retry_s >= 1


def answered(pool, ticket):
    pool._take(ticket.engine, ticket.engine.pipe, ("done", ticket.number, Scores((), 0, 0.0, 0.0)))


SMALL, LARGE = job(Content("a red hat")), job(photograph(500_000))


def test_work_that_waits_is_counted_in_seconds():
    pool = pool_of(queue_s=1.0, queue=1000)
    (engine,) = pool.engines
    engine.pace.see(1.0, 2 * effort(LARGE, 784_000))  # a large one takes half a second
    for _ in range(3):  # the third waits for a second of work, not for more
        ticket = pool.submit(LARGE)
    refused(pool, SMALL)
    answered(pool, ticket)
    engine.pace = Pace(1.0, 2 * effort(LARGE, 784_000), 1)
    count = 0
    with pytest.raises(Refusal):
        for _ in range(1000):
            pool.submit(SMALL)
            count += 1
    assert count == 1  # with two large ones before it there was room for no more than that one


def test_many_small_ones_fit_where_few_large_ones_do():
    pool = pool_of(queue_s=1.0, queue=1000)
    pool.engines[0].pace.see(1.0, 2 * effort(LARGE, 784_000))
    for _ in range(100):
        pool.submit(SMALL)
    pool.submit(LARGE)
    assert pool.engines[0].pace.effort_s * pool.engines[0].load < 1


def test_a_first_request_is_let_in_however_long_it_takes():
    pool = pool_of(queue_s=0.001)
    pool.engines[0].pace.see(100.0, 1.0)
    ticket = pool.submit(LARGE)
    refused(pool, SMALL)
    pool.release(ticket)
    pool.submit(SMALL)


def test_requests_that_are_being_read_have_their_places():
    pool = pool_of(queue=4, queue_s=1.0)
    pool.arriving = 3
    pool.submit(SMALL)
    refused(pool, SMALL)  # by number: 3 and 1
    pool = pool_of(queue=100, queue_s=1.0)
    pool.engines[0].pace = Pace(10.0, 1000.0, 20.0)  # half a second a request
    pool.arriving = 3
    refused(pool, SMALL)  # by time
    pool.arriving = 2
    pool.submit(SMALL)


def test_a_request_goes_to_the_engine_with_the_least_to_do():
    pool = pool_of(2)
    large = pool.submit(LARGE)
    small = [pool.submit(SMALL) for _ in range(5)]
    assert {t.engine.index for t in small} == {1} and large.engine.index == 0


def test_the_pace_is_measured_while_an_engine_is_busy():
    pool = pool_of()
    (engine,) = pool.engines
    first, second = pool.submit(SMALL), pool.submit(LARGE)
    began = engine.busy_since_s
    time.sleep(0.01)
    answered(pool, first)
    between = engine.busy_since_s
    time.sleep(0.02)
    answered(pool, second)
    ended = engine.busy_since_s
    assert between - began >= 0.01 and ended - between >= 0.02
    assert engine.pace.busy_s == pytest.approx(KEPT * (between - began) + ended - between)
    assert engine.pace.effort == pytest.approx(KEPT * first.effort + second.effort) and not engine.tickets
    time.sleep(0.02)
    pool.submit(SMALL)
    assert engine.busy_since_s - ended >= 0.02  # nothing was to be done meanwhile


# ---- A real server


def read_answer(sock):
    """One answer of a connection that stays open: its head, and its body."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += sock.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return head.decode(), body


def request(body, **headers):
    lines = {"host": "a", "content-length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /v1/rerank HTTP/1.1\r\n{head}\r\n".encode() + body


def test_what_is_refused_is_not_read_and_the_connection_goes_on(tmp_path):
    """The one place is taken by a small request that waits for others to share a batch with, until its client goes."""
    small, large = (json.dumps({"query": text, "documents": ["b"]}).encode() for text in ("a", "a red dress " * 50))
    words = ("serve.queue=1", "serve.body_mb=1", "serve.wait_ms=60000", "serve.batch_tokens=150")
    with serving.serving(tmp_path, "builtin:tiny", *PIXELS, *words) as server:
        host, port = server.url.removeprefix("http://").split(":")

        def ask(raw):
            more.sendall(raw)
            head, said = read_answer(more)
            return head, json.loads(said)

        def wait_until_running(count):
            while f"litchi_running_requests {count}.0" not in server.get("/metrics").text:
                time.sleep(0.05)

        with socket.create_connection((host, int(port))) as more:
            with socket.create_connection((host, int(port))) as first:
                first.sendall(request(small))
                wait_until_running(1)
                for size in (1, 200_000, 20_000_000):  # the last one would also be too large
                    head, said = ask(request(b"x" * size))
                    assert head.startswith("HTTP/1.1 503") and "retry-after: 2" in head and "connection" not in head
                    assert said["error"]["code"] == "overloaded"
                assert ask(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")[0].startswith("HTTP/1.1 200")
            wait_until_running(0)
            assert ask(request(large))[0].startswith("HTTP/1.1 200")
            assert ask(b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 12_000)[0].startswith("HTTP/1.1 431")
        while sum(map(int, re.findall(r"(\d+) requests were refused unread", server.log))) < 3:
            time.sleep(0.05)
        assert 'litchi_requests_total{path="/v1/rerank",status="503"} 3.0' in server.get("/metrics").text
