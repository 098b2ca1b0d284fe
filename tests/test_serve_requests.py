"""What clients may not do to a server: ask wrongly in forty ways, too slowly, too much, without a key, at random."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import serving
from serving import PIXELS, as_request, bad_requests, logits_of, mixed_rows, send

from litchi.serve.answers import Growing
from litchi.serve.batcher import SPREAD_S, Batcher, Budget, Work, choose
from litchi.serve.fetch import Fetcher, is_public, remote_places
from litchi.serve.limits import Gate, Refusal, digest, read_keys

NEAR = 1e-5
KINDS = {"invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Fetches from this machine's own name, were its address a public one; slow clients have four seconds, and nobody
    is refused because this machine is busy."""
    words = (*PIXELS, "--allow-host", "localhost", "serve.arrival_s=4", "serve.queue=128", "serve.queue_s=600")
    with serving.serving(tmp_path_factory.mktemp("server"), "builtin:tiny", *words) as one:
        yield one


@pytest.fixture
def listener():
    """A port of this machine, and how many have knocked."""
    knocks = []
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def listen():
            while True:
                try:
                    sock.accept()
                except OSError:
                    return
                knocks.append(1)

        threading.Thread(target=listen, daemon=True).start()
        yield sock.getsockname()[1], knocks


def assert_said(answer, allowed):
    """A refusal: a status of the client's, one JSON error, nothing of the server's inside."""
    assert answer.status_code in allowed, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] in KINDS
    assert error["message"] and error["code"] and len(error["message"]) < 400
    assert_no_inside(answer.text)


def assert_no_inside(text):
    assert not re.search(r"Traceback|File \"|site-packages|litchi[./]\w+\.py|0x[0-9a-f]{8}", text), text


def test_every_bad_request_is_refused_and_its_neighbours_are_not_touched(server, tmp_path, listener):
    port, knocks = listener
    bad = bad_requests(tmp_path, port)
    assert len(bad) >= 40
    good = [as_request(row) for row in mixed_rows(tmp_path / "good", 8)]
    wanted = [logits_of(server.post("/v1/rerank", body)) for body in good]

    for name, (path, body, allowed) in bad.items():
        try:
            assert_said(send(server, path, body), allowed)
        except AssertionError as error:
            raise AssertionError(name) from error

    async def together():
        async with server.client() as client:
            calls = []
            for number, (path, body, _) in enumerate(bad.values()):
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                calls.append(client.post(path, content=raw))
                if number % 8 == 0:
                    calls.append(client.post("/v1/rerank", json=good[number // 8 % len(good)]))
            return await asyncio.gather(*calls)

    answers = asyncio.run(together())
    found = [logits_of(a) for a in answers if a.status_code == 200]
    assert len(found) == (len(bad) + 7) // 8
    for number, ours in enumerate(found):
        assert ours == pytest.approx(wanted[number % len(good)], abs=NEAR)
    refused = [a for a in answers if a.status_code != 200]
    for answer, (_, _, allowed) in zip(refused, bad.values(), strict=True):
        assert_said(answer, allowed)
    again = [logits_of(server.post("/v1/rerank", body)) for body in good]
    assert [pytest.approx(w, abs=NEAR) for w in wanted] == again
    assert not knocks, "the server has connected to an address of a request"
    assert "Traceback" not in server.log


# ---- Slow, many, unknown


def talk(server, *pieces, wait_s=0.0):
    """Send bytes with pauses; return what comes back until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(wait_s)
        got = b""
        while block := sock.recv(4096):
            got += block
        return got.decode()


HEAD = b"POST /v1/rerank HTTP/1.1\r\nhost: a\r\n"


def test_slow_clients_are_cut_off(server):
    clients = [
        (),  # says nothing
        (HEAD,),  # half of its headers
        (HEAD + b"content-length: 100\r\n\r\n", b'{"query"'),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"5\r\n12345\r\n"),
    ]
    with ThreadPoolExecutor(len(clients)) as pool:
        answers = [*pool.map(lambda pieces: talk(server, *pieces), clients)]
    assert all(answer.startswith("HTTP/1.1 408") for answer in answers) and "timeout" in answers[2]
    assert server.get("/health").status_code == 200


def test_a_body_without_a_length_is_counted_too(server):
    def endless():
        while True:
            yield b"a" * 2**20

    with pytest.raises((httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError)):
        answer = httpx.post(f"{server.url}/v1/rerank", content=endless(), timeout=60, trust_env=False)
        assert answer.status_code in (408, 413)  # it may still be read
        raise httpx.ReadError("read")
    line = server.logged(error="body_too_large")
    assert line["status"] == 413


def test_compressed_bodies_are_not_read(server):
    answer = server.post("/v1/rerank", content=b"x", headers={"content-encoding": "gzip"})
    assert_said(answer, {415})


@pytest.mark.slow
def test_who_has_no_key_or_asks_too_often_is_refused(tmp_path):
    (tmp_path / "keys").write_text("# of the shop\nfirst-key\n\nsecond-key\n")
    words = ("builtin:tiny", "--api-key-file", str(tmp_path / "keys"), "serve.rate=0.01", *PIXELS)
    with serving.serving(tmp_path / "s", *words, env={"LITCHI_API_KEYS": "third-key"}) as server:
        body = {"query": "a", "documents": ["b"]}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first-key"}):
            answer = server.post("/v1/rerank", body, headers=headers)
            assert_said(answer, {401})
            assert answer.json()["error"]["type"] == "authentication_error"
        for key in ("first-key", "second-key", "third-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.post("/v1/rerank", body, headers=headers).status_code == 200
            again = server.post("/v1/rerank", body, headers=headers)
            assert_said(again, {429})
            assert int(again.headers["retry-after"]) >= 1
        assert server.get("/health").status_code == 200
        assert server.get("/v1/models").status_code == 401
        assert not re.search("(first|second|third)-key", server.log)


def test_a_full_queue_refuses_and_what_it_took_is_right(tmp_path):
    with serving.serving(tmp_path, "builtin:tiny", *PIXELS, "serve.queue=3") as server:
        bodies = [as_request(row) for row in mixed_rows(tmp_path / "rows", 5)]
        wanted = [logits_of(server.post("/v1/rerank", body)) for body in bodies]

        async def flood():
            async with server.client() as client:
                return await asyncio.gather(*(client.post("/v1/rerank", json=bodies[i % 5]) for i in range(60)))

        answers = asyncio.run(flood())
        refused = [a for a in answers if a.status_code != 200]
        assert 0 < len(refused) < 60
        for answer in refused:
            assert_said(answer, {503})
            assert answer.json()["error"]["code"] == "overloaded" and int(answer.headers["retry-after"]) >= 1
        for number, answer in enumerate(answers):
            if answer.status_code == 200:
                assert logits_of(answer) == pytest.approx(wanted[number % 5], abs=NEAR)
        assert logits_of(server.post("/v1/rerank", bodies[0])) == pytest.approx(wanted[0], abs=NEAR)


def test_the_work_of_a_client_that_goes_away_is_dropped(server):
    host, port = server.url.removeprefix("http://").split(":")
    text = "Describe everything you know about red dresses."
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1000}).encode()
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body[:-1])
        time.sleep(0.2)
        sock.sendall(body[-1:])
    server.logged(path="/v1/chat/completions", status=499)
    deadline = time.monotonic() + 10
    while "litchi_running_requests 0.0" not in server.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- At random


SEEDS = [
    ("/v1/rerank", {"query": "red dress", "documents": ["a", {"text": "b", "image": None}], "top_n": 1}),
    ("/v1/rerank", {"query": {"text": "x"}, "documents": [{"image": "PICTURE"}], "return_documents": True}),
    ("/v1/score", {"pairs": [{"query": "a", "document": {"text": "b"}}, {"query": "a", "document": "c"}]}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"], "instruction": "Match."}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "PICTURE"}}]},
            ],
            "max_tokens": 2,
            "stream": False,
        },
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stop": ["x"]}),
]
ODD = (
    *(None, True, False, 0, -1, 1, 2**63, -(2**63), 1e300, 0.5, "", " ", "\x00", "a" * 5000, "\ud7ff", "\U0001f600"),
    *([], {}, [[]], [None], {"": None}, {"text": {}}, {"type": "text"}, {"url": 1}, "data:image/png;base64,", "data:"),
    *(
        "file:///etc/passwd",
        "http://127.0.0.1:1/",
        "../../etc/passwd",
        "<|im_end|>",
        "<image>",
        "{{7*7}}",
        "\u202e%s%n",
    ),
)


def mutate(value, dice):
    """The same JSON value with a few places changed, removed, doubled or put elsewhere."""
    value = json.loads(json.dumps(value))
    for _ in range(dice.randint(1, 3)):
        places = list(walk(value))
        if not places:
            return dice.choice(ODD)
        holder, key = dice.choice(places)
        change = dice.randrange(5)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, list):
            holder.extend(copy.deepcopy([holder[key]] * dice.randint(1, 3)))
        elif change == 2 and isinstance(holder, dict):
            holder[dice.choice(("text", "image", "video", "content", "n", "stream", "extra", "documents"))] = holder[
                key
            ]
        elif change == 3 and isinstance(holder[key], str):
            text = holder[key]
            at = dice.randrange(len(text) + 1)
            holder[key] = text[:at] + dice.choice(("\x00", "é", "%", "\\", '"', "\ufffd", "\n")) + text[at + 1 :]
        else:
            holder[key] = copy.deepcopy(dice.choice(ODD))
    return value


def walk(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from walk(inner)


def mutated(count, picture):
    dice = random.Random(count)
    for number in range(count):
        path, body = SEEDS[number % len(SEEDS)]
        body = json.loads(json.dumps(body).replace("PICTURE", picture))
        raw = json.dumps(mutate(body, dice)).encode()
        if dice.random() < 0.1:
            at = dice.randrange(len(raw))
            raw = raw[:at] + bytes([dice.randrange(256)]) + raw[at + dice.randint(0, 3) :]
        yield path, raw


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_requests_never_crash_the_server(server, tmp_path, count):
    picture = serving.data_url(Path(serving.draw(tmp_path / "p.png", 60, 60)).read_bytes())
    seen = {}
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        for path, raw in mutated(count, picture):
            answer = client.post(path, content=raw)
            assert answer.status_code < 500, (raw, answer.text)
            assert_no_inside(answer.text)
            if answer.status_code >= 400:
                assert_said(answer, {400, 413})
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
    assert seen[200] > count // 20 and seen[400] > count // 5, seen
    assert "Traceback" not in server.log


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_openapi_form_allows_and_forbids_never_crashes_the_server(server):
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    asked, count = {}, 0
    for operation in (found.ok() for found in schema.get_all_operations()):
        for mode in schemathesis.GenerationMode if operation.method == "post" else ():

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=350, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            def ask(case):
                nonlocal count
                count += 1
                answer = case.call(timeout=60)
                assert answer.status_code < 500, answer.text
                assert_no_inside(answer.text)
                asked.setdefault(case.operation.path, set()).add(answer.status_code)

            ask()
    assert count >= 2000 and {200, 400} <= asked["/v1/rerank"] and "Traceback" not in server.log


# ---- The pieces, without a server


def work(request, tokens=10, patches=0, due=0.0, kind="score"):
    return Work(request, kind, tokens, patches, due)


def test_a_batch_takes_what_is_due_first_and_what_still_fits():
    budget = Budget(tokens=100, patches=50, wait_s=0)
    waiting = [
        work(1, 60, due=2),
        work(2, 60, due=1),
        work(3, 30, due=3),
        work(4, 5, 60, due=4),
        work(5, 10, 50, due=5),
    ]
    assert [w.request for w in choose(waiting, budget)] == [2, 3, 5]
    assert [w.request for w in choose([work(1, 500), work(2, 1, due=1)], budget)] == [1]  # too large for any: alone
    mixed = [work(1, kind="chat"), work(2, due=1), work(3, due=2, kind="chat")]
    assert [w.request for w in choose(mixed, budget)] == [1, 3]
    assert [w.request for w in choose(mixed, budget, ("score",))] == [2]


def test_small_requests_get_in_between_the_pieces_of_a_large_one():
    budget = Budget(tokens=10, patches=0, wait_s=0)
    waiting = [work(1, due=SPREAD_S * n) for n in range(4)] + [work(2, due=SPREAD_S * 1.5)]
    order = []
    while waiting:
        (one,) = choose(waiting, budget)
        waiting.remove(one)
        order.append(one.request)
    assert order == [1, 1, 2, 1, 1]


def test_a_first_piece_waits_for_others_until_its_deadline_or_a_full_batch():
    clock = [0.0]
    batcher = Batcher(Budget(100, 100, wait_s=0.01), 100, lambda: clock[0])
    assert batcher.take(("score",), block=False) == []
    batcher.add([work(1, 60)])
    batcher.changed.wait = lambda rest: clock.__setitem__(0, clock[0] + rest)  # time passes
    assert [w.request for w in batcher.take(("score",), block=True)] == [1] and clock[0] == pytest.approx(0.01)
    batcher.add([work(2, 60), work(3, 60)])
    assert [w.request for w in batcher.take(("score",), block=True)] == [2] and clock[0] == pytest.approx(0.01)
    batcher.busy()  # what gathered while the model was at work waits no longer
    assert [w.request for w in batcher.take(("score",), block=True)] == [3] and clock[0] == pytest.approx(0.01)


def test_features_are_kept_up_to_their_limit_and_the_last_used_stay():
    torch = pytest.importorskip("torch")
    from litchi.data.features import NO_STAMP, PictureName
    from litchi.serve.memory import FeatureMemory

    names = [PictureName(NO_STAMP, bytes([i]) * 32, (1, 2, 2)) for i in range(4)]
    memory = FeatureMemory(3 * 40)
    batch = torch.arange(30.0).view(3, 10)
    memory.keep(names[:3], list(batch.split(1)))
    batch.zero_()  # copies are kept
    assert memory.find(names[0]).features.tolist() == [list(range(10))]
    memory.keep(names[3:], [torch.ones(1, 10)])
    assert [memory.find(n) is None for n in names] == [False, True, False, False] and memory.held_bytes == 120
    both, bad = memory.read([memory.find(names[0]), memory.find(names[3])])
    assert both.shape == (2, 10) and not bad
    memory.keep(names[:1], [torch.zeros(1, 10)])
    assert memory.held_bytes == 120


def test_text_is_held_back_while_it_may_change():
    words = {0: "ab", 1: "EN", 2: "D c", 3: "\ufffd", 4: "é"}

    def decode(ids):
        return "".join(words[i] for i in ids).replace("\ufffdé", "é")

    growing = Growing(decode, 9, ("END",))
    assert [growing.add(i) for i in (0, 1, 2)] == ["ab", "", ""] and (growing.text, growing.reason) == ("ab", "stop")
    growing = Growing(decode, 9, ("END",))
    assert [growing.add(i) for i in (1, 0, 3, 4, None)] == ["", "ENab", "", "é", ""] and growing.reason == "stop"
    growing = Growing(decode, 2, ())
    assert [growing.add(i) for i in (0, 3)] == ["ab", "\ufffd"] and growing.reason == "length"


def test_a_key_has_its_rate_and_its_places():
    clock = [100.0]
    gate = Gate(frozenset(), rate=2, concurrency=2, clock=lambda: clock[0])
    assert gate.enter(None, "a") == gate.enter(None, "a") == "a"
    with pytest.raises(Refusal) as refused:
        gate.enter(None, "a")
    assert refused.value.status == 429 and refused.value.code == "rate_limit" and refused.value.retry_s == 0.5
    clock[0] += 1
    with pytest.raises(Refusal) as refused:
        gate.enter(None, "a")
    assert refused.value.code == "concurrency_limit"
    gate.leave("a")
    assert gate.enter(None, "a") == "a" and gate.enter(None, "b") == "b"


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("one\n # no key\ntwo\n")
    monkeypatch.setenv("LITCHI_API_KEYS", "three, ,four")
    assert read_keys(str(tmp_path / "keys")) == {digest(key) for key in ("one", "two", "three", "four")}


# ---- Pictures of other machines


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"]
    + ["::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::"]
    + ["::7f00:1", "64:ff9b::7f00:1", "240.0.0.1"],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


def test_addresses_that_are_public():
    assert is_public("1.1.1.1") and is_public("2606:4700:4700::1111")


@pytest.mark.parametrize(
    "url",
    ["http://ok.example/a", "https://other.example/a", "https://ok.example:8443/a", "https://ok.example.evil.org/a"]
    + ["https://a@ok.example/a", "https://ok.example@evil.org/", "https://1.1.1.1/a", "https:///a", "https://[::1/a"]
    + ["https://ok.example\\@evil.org/a", "https://ok.example/a\r\nx: y", "//ok.example/a", "file:///etc/passwd"],
)
def test_urls_that_are_not_fetched(url):
    def resolve(host, port):
        raise AssertionError(f"looked up {host}")

    with pytest.raises(Refusal) as refused:
        Fetcher(frozenset({"ok.example"}), resolve=resolve).fetch(url, "image")
    assert refused.value.status == 400 and refused.value.param == "image"


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["1.1.1.1", "10.0.0.1"], []])
def test_a_name_with_an_address_of_this_network_is_not_fetched(addresses):
    fetcher = Fetcher(frozenset({"ok.example"}), resolve=lambda host, port: addresses)
    with pytest.raises(Refusal, match="no public address"):
        fetcher.fetch("https://ok.example/a", "image")


class PlainText(ssl.SSLContext):
    """Stands for TLS: a certificate for ok.example cannot be had here. Notes for whom it was asked."""

    names: list[str]

    def wrap_socket(self, sock, server_hostname):
        self.names.append(server_hostname)
        return sock


@pytest.fixture
def site():
    """A site of this machine: path -> (status, headers, body); yields (routes, fetcher, certificates asked for)."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    routes = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = routes[self.path]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for piece in body:
                try:
                    self.wfile.write(piece)
                except OSError:
                    return
                time.sleep(0.05 * (len(piece) == 1))

        def log_message(self, *what):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        plain = PlainText(ssl.PROTOCOL_TLS_CLIENT)
        plain.names = []
        fetcher = Fetcher(
            frozenset({"ok.example"}),
            limit_bytes=1000,
            limit_s=1.0,
            resolve=lambda host, port: ["127.0.0.1"],
            public=lambda address: True,
            context=plain,
            port=http.server_address[1],
        )
        yield routes, fetcher, plain.names
        http.shutdown()


def test_a_picture_is_fetched_from_the_address_that_was_checked(site):
    routes, fetcher, names = site
    routes["/a?b=1"] = (200, {}, [b"abc"])
    routes["/moved"] = (302, {"location": "/a?b=1"}, [])
    assert fetcher.fetch("https://ok.example/a?b=1", "image") == b"abc"
    assert fetcher.fetch("https://ok.example/moved", "image") == b"abc"
    assert names == ["ok.example"] * 3


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ((302, {"location": "https://evil.example/"}, []), 400, "not fetched"),
        ((302, {"location": "http://ok.example/a"}, []), 400, "not fetched"),
        ((302, {"location": "/a"}, []), 400, "redirects"),
        ((302, {}, []), 400, "redirects"),
        ((404, {}, [b"x"]), 400, "answers 404"),
        ((200, {}, [b"x" * 2000]), 413, "bytes"),
        ((200, {}, [b"x"] * 200), 400, "cannot be read"),
    ],
)
def test_what_a_site_may_not_do(site, answer, status, said):
    routes, fetcher, _ = site
    routes["/a"] = answer
    with pytest.raises(Refusal, match=said) as refused:
        fetcher.fetch("https://ok.example/a", "image")
    assert refused.value.status == status


def test_urls_of_pictures_are_found_and_those_in_texts_are_not():
    url = "https://a/b.png"
    body = {
        "query": {"text": url, "image": url},
        "documents": [url, {"image": [url, "x"]}],
        "messages": [{"content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": url}]}],
    }
    names = sorted(name for _, _, name in remote_places(body))
    assert names == ["documents[1].image[0]", "messages[0].content[0].image_url.url", "query.image"]
