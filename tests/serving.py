"""A real server for tests: its process, its address, rows as requests, requests that are wrong in forty ways."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import runs
from processes import Running, start_litchi, start_serving
from rendering import draw
from safetensors.torch import load_file, save_file

PIXELS = ("data.pixels.min=3136", "data.pixels.max=50176")


class Served:
    """A server under way."""

    def __init__(self, running: Running):
        self.running = running

    @property
    def url(self) -> str:
        found = re.search(r"serving \S+ on (http://[^\"]+)", self.log)
        assert found, self.log
        return found.group(1)

    @property
    def log(self) -> str:
        return self.running.read()[1]

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False, **more)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=300, trust_env=False, limits=httpx.Limits())

    def logged(self, timeout_s: float = 10, **facts: Any) -> dict[str, Any]:
        """The line of the log that has these facts; it may come a moment after the answer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
            for line in lines:
                if facts.items() <= line.items():
                    return line
            time.sleep(0.05)
        raise AssertionError(f"{facts} is not logged:\n{self.log}")

    def stop(self) -> int:
        self.running.process.terminate()
        return self.running.end(30).status


def start_server(folder: Path, *words: str, env: dict[str, str] | None = None, spawn: bool = False) -> Served:
    """Start `litchi serve WORDS` on a free port, without waiting for it; with `spawn`, engines are new interpreters."""
    words = (*words, "--port", "0")
    running = start_litchi(folder, "serve", *words, env=env) if spawn else start_serving(folder, *words, env=env)
    return Served(running)


@contextmanager
def serving(folder: Path, *words: str, env: dict[str, str] | None = None, spawn: bool = False) -> Iterator[Served]:
    """A server that is ready."""
    server = start_server(folder, *words, env=env, spawn=spawn)
    try:
        server.running.wait_for("serving ", timeout_s=100)
        yield server
    finally:
        server.running.kill()


# ---- Good requests


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


WORDS = ("red", "blue", "striped", "silk", "dress", "mug", "with", "handle", "réd", "裙子", "of", "42")


def mixed_rows(folder: Path, count: int, seed: int = 0) -> list[dict]:
    """Groups of many kinds, with pictures as paths: as data files have them."""
    dice = random.Random(seed)
    pictures = [draw(folder / f"m{i}.png", 40 + 30 * i, 150 - 15 * i, seed=i) for i in range(6)]

    def content(longest: int) -> Any:
        text = " ".join(dice.choices(WORDS, k=dice.randint(1, longest)))
        if dice.random() < 0.6:
            return text
        image = dice.choice(pictures)
        return {"image": image} if dice.random() < 0.5 else {"text": text, "image": image}

    rows = []
    for i in range(count):
        documents = [content(dice.choice((4, 12, 60))) for _ in range(dice.randint(1, 7))]
        row = {"id": f"r{i}", "query": content(5), "documents": documents, "labels": [0] * len(documents)}
        rows.append(row | ({"instruction": "Find the same product."} if dice.random() < 0.3 else {}))
    return rows


def as_request(row: dict) -> dict:
    """The same group as a client sends it."""

    def inline(content: Any) -> Any:
        if not isinstance(content, dict) or "image" not in content:
            return content
        return content | {"image": data_url(Path(content["image"]).read_bytes())}

    asked = {"query": inline(row["query"]), "documents": [inline(d) for d in row["documents"]]}
    return asked | ({"instruction": row["instruction"]} if "instruction" in row else {})


def logits_of(answer: httpx.Response) -> list[float]:
    """The scores of an answer, in the order the documents were sent."""
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert [r["logit"] for r in results] == sorted((r["logit"] for r in results), reverse=True)
    return [r["logit"] for r in sorted(results, key=lambda r: r["index"])]


def scores_by_litchi(folder: Path, rows: list[dict], ranks, *words: str) -> list[list[float]]:
    """What `litchi score` writes for these rows, a file of one row after the other."""
    from litchi.train.writing import write_lines

    file = runs.write_rows(folder / "rows.jsonl", rows)
    write_lines("builtin:tiny", str(file), [*words, "data.workers=0"], folder / "scores.jsonl", ranks, task="rerank")
    scores: dict[str, list[float]] = {row["id"]: [] for row in rows}
    for line in runs.read_rows(folder / "scores.jsonl"):
        scores[line["query_id"]].append(line["score"])
    return [scores[row["id"]] for row in rows]


# ---- Models


def copy_base(folder, change):
    """The packaged base with changed weights, as a folder."""
    from litchi.model.build import builtin_folder

    shutil.copytree(builtin_folder(), folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- Bad requests


def bad_requests(folder: Path, port: int) -> dict[str, tuple[str, Any, set[int]]]:
    """name -> (path, body or raw bytes, statuses allowed). `port` is that of a listener that must hear nothing."""
    picture = draw(folder / "canary.png", 60, 60)
    png = Path(picture).read_bytes()
    jpeg = draw(folder / "canary.jpg", 60, 60)
    cut_jpeg = Path(jpeg).read_bytes()[:-40]
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 255
    bomb = bomb_png(20_000, 20_000)

    def rerank(**fields: Any) -> tuple[str, Any, set[int]]:
        return "/v1/rerank", {"query": "card", "documents": ["a red dress"], **fields}, {400}

    def image(value: Any, *allowed: int) -> tuple[str, Any, set[int]]:
        return "/v1/rerank", {"query": "card", "documents": ["x", {"image": value}]}, set(allowed or (400,))

    def chat(*content: Any, **fields: Any) -> tuple[str, Any, set[int]]:
        messages = [{"role": "user", "content": list(content) or "Is it red?"}]
        return "/v1/chat/completions", {"messages": messages, **fields}, {400}

    def part(url: Any) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    return {
        "not JSON": ("/v1/rerank", b"{", {400}),
        "no body": ("/v1/rerank", b"", {400}),
        "not an object": ("/v1/rerank", b"[1, 2]", {400}),
        "not UTF-8": ("/v1/rerank", b'{"query": "\xff\xfe", "documents": ["a"]}', {400}),
        "NaN": ("/v1/rerank", b'{"query": "a", "documents": ["b"], "top_n": NaN}', {400}),
        "key twice": ("/v1/rerank", b'{"query": "a", "query": "b", "documents": ["c"]}', {400}),
        "half a pair": ("/v1/rerank", b'{"query": "\\ud800", "documents": ["a"]}', {400}),
        "deep": ("/v1/rerank", b'{"query": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", {400}),
        "no query": ("/v1/rerank", {"documents": ["a"]}, {400}),
        "empty query": rerank(query="   "),
        "number as query": rerank(query=5),
        "list as query": rerank(query=["a"]),
        "no documents": rerank(documents=[]),
        "text as documents": rerank(documents="a red dress"),
        "null document": rerank(documents=["a", None]),
        "empty document": rerank(documents=[{}]),
        "number as text": rerank(documents=[{"text": 7}]),
        "negative top_n": rerank(top_n=-1),
        "top_n of 0": rerank(top_n=0),
        "true as top_n": rerank(top_n=True),
        "text as flag": rerank(return_documents="yes"),
        "number as instruction": rerank(instruction=1),
        "too many documents": ("/v1/rerank", {"query": "a", "documents": ["b"] * 1001}, {413}),
        "long text": ("/v1/rerank", {"query": "a", "documents": ["w " * 9000]}, {413}),
        "very long text": ("/v1/rerank", {"query": "w " * 1_000_000, "documents": ["a"]}, {413}),
        "huge body": ("/v1/rerank", b'{"query": "' + b"a" * 40_000_000 + b'"}', {413}),
        "bad base64": image("data:image/png;base64,@@@@"),
        "no base64": image("data:image/png,abc"),
        "not a picture": image(data_url(b"<html>not found</html>")),
        "cut PNG": image(data_url(png[:-20])),
        "damaged PNG": image(data_url(bytes(flipped))),
        "cut JPEG": image(data_url(cut_jpeg, "jpeg")),
        "bomb": image(data_url(bomb), 413),
        "thin": image(data_url(bomb_png(3000, 4))),
        "SVG": image(data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml")),
        "a path": image(picture),
        "a relative path": image("../" * 12 + picture.lstrip("/")),
        "a file URL": image(f"file://{picture}"),
        "a device": image("/dev/zero"),
        "loopback": image(f"http://127.0.0.1:{port}/a.png"),
        "a name": image(f"https://localhost:{port}/a.png"),
        "IPv6": image(f"http://[::1]:{port}/a.png"),
        "hexadecimal": image(f"http://0x7f000001:{port}/a.png"),
        "a user before it": image(f"https://localhost@127.0.0.1:{port}/a.png"),
        "metadata": image("http://169.254.169.254/latest/meta-data"),
        "FTP": image(f"ftp://127.0.0.1:{port}/a.png"),
        "no scheme": image(f"//127.0.0.1:{port}/a.png"),
        "an allowed name, here": image("https://localhost/a.png"),
        "a picture in a picture": image({"url": picture}),
        "frames": ("/v1/rerank", {"query": "a", "documents": [{"video": [picture, picture]}]}, {400}),
        "no pairs": ("/v1/score", {}, {400}),
        "pair of one": ("/v1/score", {"pairs": [{"query": "a"}]}, {400}),
        "odd pairs": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, {400}),
        "no messages": ("/v1/chat/completions", {"messages": []}, {400}),
        "text as message": ("/v1/chat/completions", {"messages": ["hello"]}, {400}),
        "unknown role": ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, {400}),
        "null content": ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, {400}),
        "warm": chat(temperature=0.7),
        "two answers": chat(n=2),
        "tools": chat(tools=[{"type": "function"}]),
        "no tokens": chat(max_tokens=0),
        "chat with a path": chat(part(picture)),
        "chat with a URL": chat(part(f"http://127.0.0.1:{port}/a.png")),
        "chat with a cut PNG": chat(part(data_url(png[:-20]))),
        "chat with a video": chat({"type": "video_url", "video_url": {"url": f"http://127.0.0.1:{port}/a.mp4"}}),
        "unknown path": ("/v1/embeddings", {"input": "a"}, {404}),
    }


def bomb_png(width: int, height: int) -> bytes:
    """A small file of a picture that takes much room."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = bytes(1 + (width + 7) // 8)
    squeeze = zlib.compressobj(9)
    pixels = b"".join(squeeze.compress(row) for _ in range(height)) + squeeze.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def send(server: Served, path: str, body: Any) -> httpx.Response:
    """Post a body as it is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.post(path, content=raw, headers={"content-type": "application/json"})
