"""`litchi serve` beside a plain padded forward, and under ten times the load it can take: `python benchmarks/serve.py`.

Speed: 100 documents for one query (half of them with a picture of their own, never met before), documents per second
and the median time of a request; beside it transformers' own model and processor on 16 padded pairs at a time. Load:
requests of 10 documents arrive at 70 % of what the server takes, then at ten times that. Where there are two cores the
server has one and the load the other. Prints a Markdown table.

    python benchmarks/serve.py [--seconds 60] [--requests 10] [--only speed|load] [WORD...]     WORDs go to litchi serve
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

WORDS = ("red", "blue", "striped", "silk", "cotton", "dress", "mug", "handle", "lid", "summer", "small", "round", "for")
PAIRS = 16
PIXELS = (3136, 50_176)


def picture(seed: int, side: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def as_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words))


def group(seed: int, documents: int) -> dict[str, Any]:
    """A request as a shop makes it: a query of 12 words with a picture, titles of 3 to 12 words, every second one with
    a smaller picture."""
    dice = random.Random(seed)
    made: list[Any] = []
    for number in range(documents):
        said = text(dice, dice.randint(3, 12))
        made.append({"text": said, "image": as_url(picture(1000 * seed + number, 112))} if number % 2 else said)
    return {"query": {"text": text(dice, 12), "image": as_url(picture(seed, 224))}, "documents": made}


# ------------------------------------------------------------------------------------------------------- the server


class Server:
    """`litchi serve builtin:tiny` on one core."""

    def __init__(self, folder: Path, words: list[str]):
        self.err = folder / "err.txt"
        cores = sorted(os.sched_getaffinity(0))
        pin = ["taskset", "-c", str(cores[0])] if len(cores) > 1 else []
        command = [*pin, sys.executable, "-m", "litchi", "serve", "builtin:tiny", "--port", "0"]
        command += [f"data.pixels.min={PIXELS[0]}", f"data.pixels.max={PIXELS[1]}", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.err.open("w") as err:
            self.process = subprocess.Popen(command, stderr=err, env=env)
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores[1]})
        while not (found := re.search(r"serving \S+ on http://127.0.0.1:(\d+)", self.err.read_text())):
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.2)
        self.port = int(found.group(1))

    def memory(self) -> int:
        front = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [front, *front.children(recursive=True)])

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Connection:
    """One connection that stays open."""

    def __init__(self, port: int):
        self.port = port
        self.streams: Any = None

    async def post(self, raw: bytes) -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        head = f"POST /v1/rerank HTTP/1.1\r\nhost: a\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
        writer.write(head + raw)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", answer).group(1))  # type: ignore[union-attr]
        return int(answer.split(b" ", 2)[1]), await reader.readexactly(length)


async def one_after_the_other(port: int, bodies: list[bytes]) -> list[float]:
    connection, times = Connection(port), []
    for raw in bodies:
        began = time.perf_counter()
        status, answer = await connection.post(raw)
        assert status == 200, answer
        times.append(time.perf_counter() - began)
    return times


async def arrive(port: int, bodies: list[bytes], rate: float, seconds: float) -> list[tuple[int, float]]:
    """Requests at a rate, whatever becomes of them: (status, seconds from when it was due)."""
    idle: list[Connection] = []
    done: list[tuple[int, float]] = []

    async def ask(raw: bytes, due: float) -> None:
        connection = idle.pop() if idle else Connection(port)
        try:
            status, _ = await connection.post(raw)
        except (OSError, asyncio.IncompleteReadError):
            done.append((0, time.perf_counter() - due))
            return
        idle.append(connection)
        done.append((status, time.perf_counter() - due))

    dice, began, tasks, due = random.Random(0), time.perf_counter(), set(), 0.0
    while due < seconds:
        rest = began + due - time.perf_counter()
        if rest > 0:
            await asyncio.sleep(rest)
        task = asyncio.create_task(ask(dice.choice(bodies), began + due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due += dice.expovariate(rate)
    await asyncio.gather(*tasks)
    return done


async def capacity(port: int, bodies: list[bytes], seconds: float, clients: int = 4) -> float:
    """Requests a second that so many clients get answered, each asking again when it has its answer."""
    end, count = time.perf_counter() + seconds, 0

    async def client(seed: int) -> None:
        nonlocal count
        connection, dice = Connection(port), random.Random(seed)
        while time.perf_counter() < end:
            status, _ = await connection.post(dice.choice(bodies))
            count += status == 200

    await asyncio.gather(*(client(seed) for seed in range(clients)))
    return count / seconds


# ------------------------------------------------------------------------------------------------ a padded forward


def padded(requests: list[dict[str, Any]]) -> list[float]:
    """Seconds of each request: transformers' processor and model, 16 padded pairs at a time, two logits of the last."""
    import torch
    import transformers

    from litchi.data.templates import TEMPLATES
    from litchi.model.build import builtin_folder

    torch.set_num_threads(1)
    folder, template = builtin_folder(), TEMPLATES["lychee"]
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    transformers.utils.logging.disable_progress_bar()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    processor.image_processor.size = {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]}
    mark = "<|vision_start|><|image_pad|><|vision_end|>"

    def opened(content: Any) -> tuple[str, list[Image.Image]]:
        if isinstance(content, str):
            return content, []
        data = base64.b64decode(content["image"].partition(",")[2])
        return mark + content["text"], [Image.open(io.BytesIO(data)).convert("RGB")]

    times = []
    for request in requests:
        began = time.perf_counter()
        query, shown = opened(request["query"])
        for start in range(0, len(request["documents"]), PAIRS):
            prompts, images = [], []
            for document in request["documents"][start : start + PAIRS]:
                said, own = opened(document)
                fields = {"instruction": template.instruction, "query": query, "document": said}
                prompts.append(template.text.format(**fields))
                images += shown + own
            inputs = processor(text=prompts, images=images, padding=True, return_tensors="pt")
            with torch.no_grad():
                model(**inputs, logits_to_keep=1).logits[:, -1].float()
        times.append(time.perf_counter() - began)
    return times


def p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))] if times else float("nan")


def measure_speed(server: Server, count: int) -> None:
    """Print documents per second and the median time of a request, beside a padded forward."""
    requests = [group(seed, 100) for seed in range(1, count + 3)]
    ours = asyncio.run(one_after_the_other(server.port, [json.dumps(one).encode() for one in requests]))[2:]
    theirs = padded(requests)[2:]
    print("| 100 documents, one query | documents/s | median time of a request, s |\n|---|---|---|")
    for name, times in (("litchi serve", ours), (f"transformers, {PAIRS} padded pairs", theirs)):
        print(f"| {name} | {100 * len(times) / sum(times):.0f} | {statistics.median(times):.2f} |")
    middle = statistics.median(theirs) / statistics.median(ours)
    print(f"| ratio | {sum(theirs) / sum(ours):.1f} | {middle:.1f} |\n", flush=True)


def measure_load(server: Server, seconds: float) -> None:
    """Print what becomes of requests at 70 % of the capacity, and at ten times it."""
    bodies = [json.dumps(group(seed, 10)).encode() for seed in range(100, 140)]
    asyncio.run(one_after_the_other(server.port, bodies))  # their pictures are then known
    most = asyncio.run(capacity(server.port, bodies, min(20, seconds)))
    usual = asyncio.run(arrive(server.port, bodies, 0.7 * most, seconds))
    before = server.memory()
    flood = asyncio.run(arrive(server.port, bodies, 10 * most, seconds))
    after, alive = server.memory(), server.process.poll() is None
    print("| requests of 10 documents | asked/s | answered | refused | others | p50, ms | p99, ms | refusal p99, ms |")
    print("|---|---|---|---|---|---|---|---|")
    highs = []
    for name, answers in (("70 % load", usual), ("10x", flood)):
        good = [1000 * took for status, took in answers if status == 200]
        no = [1000 * took for status, took in answers if status in (429, 503)]
        others, rate = len(answers) - len(good) - len(no), len(answers) / seconds
        highs.append(p99(good))
        print(
            f"| {name} | {rate:.0f} | {len(good)} | {len(no)} | {others} | {statistics.median(good):.0f} "
            f"| {p99(good):.0f} | {p99(no):.0f} |"
        )
    print(f"\nCapacity {most:.0f} requests/s; accepted p99 at 10x / at 70 %: {highs[1] / highs[0]:.2f}; ", end="")
    print(f"memory {before / 2**20:.0f} -> {after / 2**20:.0f} MiB; still alive: {alive}.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--note", default="")
    parser.add_argument("--only", choices=("speed", "load"), help="one half of it")
    options, words = parser.parse_known_args()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    print(f"`python benchmarks/serve.py {' '.join(words)}`, {date}, Python {platform.python_version()}, {versions},")
    print(f"{os.cpu_count()} cores ({platform.machine()}), one thread for each model. {options.note}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), words)
        if options.only != "load":
            measure_speed(server, options.requests)
        if options.only != "speed":
            measure_load(server, options.seconds)
        server.stop()


if __name__ == "__main__":
    main()
