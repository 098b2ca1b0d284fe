"""A file with bad rows of many kinds trains exactly as its good rows alone do, and every bad one is named."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import runs
from PIL import Image

from litchi.errors import DataError

ROWS, EVERY = 1000, 20  # of which one is bad
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def picture(seed: int, kind: str = "PNG", size: tuple[int, int] = (28, 28)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def flipped(body: bytes) -> bytes:
    return body[:-30] + bytes([body[-30] ^ 255]) + body[-29:]


# kind -> (what lies at the path, or None for nothing, the code it is found under)
FAULTS = {
    "cut JPEG": (lambda n: picture(n, "JPEG", (84, 84))[: 60 + n % 40], "unreadable_media"),
    "JPEG without its end": (lambda n: picture(n, "JPEG", (84, 84))[:-40], "unreadable_media"),
    "cut PNG": (lambda n: picture(n)[:-50], "unreadable_media"),
    "PNG with a flipped byte": (lambda n: flipped(picture(n)), "unreadable_media"),
    "empty file": (lambda n: b"", "unreadable_media"),
    "a page named .png": (lambda n: b"<html>404</html>", "unreadable_media"),
    "LFS pointer": (lambda n: LFS.encode(), "unreadable_media"),
    "nothing": (lambda n: None, "media_missing"),
    "too thin": (lambda n: picture(n, size=(1, 300)), "extreme_aspect"),
    "not a row": (lambda n: None, "not_json"),
}


def write_rows(folder: Path) -> tuple[Path, dict[int, str]]:
    """1,000 rows, every twentieth bad in one of ten ways; returns the file and the code of each bad line."""
    kinds, lines, bad = list(FAULTS), [], {}
    for n in range(ROWS):
        path = folder / f"{n}.png"
        made, code = FAULTS[kinds[n // EVERY % len(kinds)]]
        wrong = n % EVERY == 7
        body = made(n) if wrong else picture(n)
        if body is not None:
            path.write_bytes(body)
        user = [{"type": "image", "image": path.name}, {"type": "text", "text": f"What is number {n}?"}]
        row = {"id": f"r{n}", "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": "red"}]}
        text = json.dumps(row)
        lines.append(text[:-5] if wrong and code == "not_json" else text)
        if wrong:
            bad[n + 1] = code
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    good = [line for n, line in enumerate(lines, 1) if n not in bad]
    (folder / "good.jsonl").write_text("\n".join(good) + "\n", encoding="utf-8")
    return folder / "rows.jsonl", bad


def test_bad_rows_are_left_out_and_counted_and_change_nothing(tmp_path, ranks):
    data, bad = write_rows(tmp_path)
    words = ["task=chat", "train.steps=6", "train.global_batch_size=8", "data.workers=0", "train.export=never"]
    with pytest.raises(DataError, match="50 of 1000 rows are bad"):
        runs.train(ranks, tmp_path / "refused", *words, f"data.train={data}")
    with pytest.raises(DataError, match=r"50 of 1000 rows are bad, data.max_bad_fraction is 0.02"):
        runs.train(ranks, tmp_path / "many", *words, f"data.train={data}", "data.on_bad_media=skip")
    skipping = [*words, f"data.train={data}", "data.on_bad_media=skip", "data.max_bad_fraction=0.05"]
    run = runs.train(ranks, tmp_path / "run", *skipping)
    named = runs.read_rows(run / "quarantine.jsonl")
    assert {row["line"]: row["reason"].split(":")[0] for row in named} == bad and len(named) == len(bad) == 50
    assert Counter(bad.values()) == {"unreadable_media": 35, "media_missing": 5, "extreme_aspect": 5, "not_json": 5}
    alone = runs.train(ranks, tmp_path / "alone", *words, f"data.train={tmp_path / 'good.jsonl'}")
    losses = [[row["loss"] for row in runs.read_rows(one / "metrics.jsonl")] for one in (run, alone)]
    assert losses[0] == losses[1] and len(losses[0]) == 6, "bit by bit"
