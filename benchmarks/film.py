"""Does a tuned model name what a long film shows, each thing in its time? Makes rows, trains, analyses, counts.

    python benchmarks/film.py DATA [--steps 1500] [--out FOLDER]

DATA holds `chat/videos/NAME.mp4` with `NAME.scenes.json` (a picture moves over a plain ground in every scene; the
scenes have `start_s`, `end_s`, `emoji`, `name_en`), `chat/train.jsonl` (conversations about such pictures),
`emoji/catalogue.jsonl` and `emoji/images/noto/EMOJI.png`. The packaged base is tuned on the conversations, and on short
clips and stills drawn here of the film's pictures and some others: at other places and sizes, on other grounds, of
other lengths. No frame of the film is among them. One call of `litchi video analyze --scenes` then asks about the film.
Exit status 1: under 15 of 21 are right.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

SIZE, FRAMES, QUESTION = (160, 120), 2, "What is in this video?"
VIDEO = (
    *(f"data.video.min_frames={FRAMES}", f"data.video.max_frames={FRAMES}"),
    *("data.video.frame_pixels.min=9000", "data.video.frame_pixels.max=9500"),
)
OTHERS = 9  # pictures the film does not show
ENOUGH = 15, 21  # of how many scenes
CONFIG = Path(__file__).parent.parent / "configs" / "chat-tiny.yaml"


def draw_clip(path: Path, picture: Image.Image, dice: random.Random) -> None:
    """Some frames of one picture, shown for the time of a scene; in every second clip it is large, in some it rests."""
    side = dice.randint(48, 60) if dice.random() < 0.5 else dice.randint(60, SIZE[1])
    small = picture.resize((side, side), Image.Resampling.LANCZOS)
    ground, rests = draw_ground(dice), dice.random() < 0.3
    with av.open(str(path), "w") as out:
        rate = Fraction(FRAMES, dice.randint(10, 48))
        stream = out.add_stream("libx264", rate=rate, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        at = dice.randint(0, SIZE[0] - side), dice.randint(0, SIZE[1] - side)
        for _ in range(FRAMES):
            frame = Image.new("RGB", SIZE, ground)
            frame.paste(small, at, small)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
            at = at if rests else (dice.randint(0, SIZE[0] - side), dice.randint(0, SIZE[1] - side))
        out.mux(stream.encode(None))


def draw_picture(path: Path, picture: Image.Image, dice: random.Random) -> None:
    """The picture alone, on a ground."""
    ground = Image.new("RGB", picture.size, draw_ground(dice))
    ground.paste(picture, None, picture)
    ground.save(path)


def draw_ground(dice: random.Random) -> tuple[int, ...]:
    """Mostly light, sometimes dark."""
    low, high = (185, 255) if dice.random() < 0.8 else (40, 100)
    return tuple(dice.randint(low, high) for _ in range(3))


def write_rows(folder: Path, data: Path, names: dict[str, str], each: int) -> Path:
    """A row for each of so many clips of each picture, and half as many of the picture alone."""
    dice, rows = random.Random(0), []
    for code, name in names.items():
        picture = Image.open(data / "emoji/images/noto" / f"{code}.png").convert("RGBA")
        for number in range(each):
            draw_clip(folder / f"{code}-{number}.mp4", picture, dice)
            rows.append(row({"type": "video", "video": f"{code}-{number}.mp4"}, QUESTION, name))
            if number % 2:
                draw_picture(folder / f"{code}-{number}.png", picture, dice)
                rows.append(row({"type": "image", "image": f"{code}-{number}.png"}, "What is in this picture?", name))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder / "rows.jsonl"


def row(shown: dict, question: str, name: str) -> dict:
    content = [shown, {"type": "text", "text": question}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": f"It shows: {name}."}]
    return {"messages": turns}


def choose_names(data: Path, scenes: list[dict]) -> dict[str, str]:
    """The film's pictures, and some others."""
    names = {scene["emoji"]: scene["name_en"] for scene in scenes}
    lines = [json.loads(line) for line in (data / "emoji/catalogue.jsonl").read_text().splitlines()]
    others = [line for line in lines if line["id"] not in names and line["split"] == "train"]
    random.Random(1).shuffle(others)
    return names | {line["id"]: line["name_en"] for line in others[:OTHERS]}


def run(*words: str) -> str:
    """Standard output of a verb, and its seconds on the screen."""
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "litchi", *words], stdout=subprocess.PIPE, text=True)
    print(f"litchi {words[0]}: {time.monotonic() - began:.0f} s", flush=True)
    if ended.returncode:
        sys.exit(ended.returncode)
    return ended.stdout


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("data", type=Path)
    asked.add_argument("--steps", type=int, default=1500)
    asked.add_argument("--each", type=int, default=60, help="clips of a picture")
    asked.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "film")
    asked.add_argument("words", nargs="*", help="settings of the training, key=value")
    given = asked.parse_intermixed_args()
    film = next(given.data.glob("chat/videos/*.scenes.json"))
    scenes = json.loads(film.read_text())["scenes"]
    given.out.mkdir(parents=True, exist_ok=True)
    rows = write_rows(given.out, given.data, choose_names(given.data, scenes), given.each)
    sources = [{"path": str(rows)}, {"path": str(given.data / "chat/train.jsonl"), "weight": 0.4, "name": "chat"}]
    parts = ("language", "vision", "merger")
    run(
        *("train", str(CONFIG), f"data.train={json.dumps(sources)}", f"output={given.out / 'run'}", "optim.lr=5e-4"),
        *(*VIDEO, f"train.steps={given.steps}", *(f"trainable.{part}=full" for part in parts), *given.words),
    )
    video = film.with_name(film.name.replace(".scenes.json", ".mp4"))
    words = ("video", "analyze", str(video), "--question", QUESTION, "--scenes", "--json")
    found = json.loads(run(*words, "--target", str(given.out / "run"), *VIDEO))["segments"]
    right = 0
    for scene in scenes:
        near = [s["text"] for s in found if all(abs(s[k] - scene[k]) < 0.2 for k in ("start_s", "end_s"))]
        right += near == [f"It shows: {scene['name_en']}."]
        print(f"{scene['start_s']:6.1f} {scene['end_s']:6.1f}  {scene['name_en']}: {' '.join(near) or 'no segment'}")
    print(f"{right} of {len(scenes)} scenes named in their time; {len(found)} segments")
    return int(right * ENOUGH[1] < ENOUGH[0] * len(scenes))


if __name__ == "__main__":
    sys.exit(main())
