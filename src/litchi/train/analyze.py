"""`litchi video analyze`: a question about a long video, answered segment by segment on all ranks, then fused.

In: a file, a question, a TARGET. Out: the answers of its segments with their times, and one answer made of them by a
text-only pass. An answer is written down as soon as it is there, so that a run that was stopped goes on. What is held
in memory is one segment of each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from litchi.config import Config
from litchi.data.media import file_stamp
from litchi.data.processor import load_processor
from litchi.data.segments import Event, group_texts, write_lines
from litchi.data.verdicts import cache_root
from litchi.data.video import video_times
from litchi.dist import Ranks, barrier, gather_objects
from litchi.errors import DataError, UsageError
from litchi.evaluate.run import EvalSet, generate_set
from litchi.model.build import resolve_model
from litchi.parallel.apply import Wrapped
from litchi.train.durable import hash_json, replace_file
from litchi.train.measure import open_set
from litchi.train.progress import count_progress
from litchi.train.target import Target, find_target, open_target, target_config, write_words
from litchi.train.watch import how_to_measure
from litchi.types import Media

LENGTH_S = 300.0
FUSE = (
    "These are answers to a question about the parts of one video, each with the time of its part. Answer the question "
    "for the whole video, with times."
)
# A segment at the family's own limits has 38,000 tokens and more; these keep it below 18,000.
USUAL: dict[str, Any] = {
    "data.max_length": 32_768,
    "data.video.max_frames": 256,
    "data.video.pixels": 16_384 * 28**2,
    "data.overlong": "error",  # a segment that is left out would leave a hole in the answer
    "data.verify": "headers",
    "eval.max_new_tokens": 256,
}
SLACK = 64  # tokens of a prompt beside its texts


@dataclass(frozen=True)
class Asked:
    """What is to be done. `length_s` is that of a segment at most; `fuse` names a TARGET, None: the same."""

    file: str
    question: str
    length_s: float = LENGTH_S
    at_scenes: bool = False
    fuse: str | None = None
    out: Path | None = None

    @property
    def kept(self) -> Path | None:
        """Where the answers of segments are kept."""
        return None if self.out is None else self.out.with_name(f"{self.out.name}.segments.jsonl")


def analyze_video(asked: Asked, name: str, overrides: Sequence[str], ranks: Ranks) -> dict[str, Any]:
    """Answer a question about a video; every rank returns the same.

    Raises:
        UserError: the file, a setting or a model cannot be used, or a segment is too long for `data.max_length`.
    """
    video_times(Media("video", os.path.abspath(asked.file)))  # says what is wrong with it
    if asked.out is not None and not asked.out.parent.is_dir():
        raise UsageError(f"--out {asked.out} cannot be written", why="its folder is not there", remedy="Make it")
    if asked.out is not None and asked.out.exists():
        raise UsageError(f"--out {asked.out} exists", why="nothing is overwritten", remedy="Remove it or name another")
    target = find_target(name)
    cut = {"data.video.segment_s": asked.length_s, "data.video.segment": "scenes" if asked.at_scenes else "fixed"}
    content = [{"type": "video", "video": os.path.abspath(asked.file)}, {"type": "text", "text": asked.question}]
    config, rows = _open_rows(target, [("video", content)], [*write_words(cut, ()), *overrides], ranks)
    segments = [row.segment for row in rows.index.rows]
    wrapped = open_target(target, config, ranks)
    who = {"target": _identity(target), "video": file_stamp(asked.file), "settings": _settings(config)}
    texts = _answer_all(wrapped, rows, ranks, config, asked, hash_json(who | {"question": asked.question}))
    events = [Event(s.start_s, s.end_s, text) for s, text in zip(segments, texts, strict=True) if s is not None]
    if asked.fuse is not None:
        target = find_target(asked.fuse)
        wrapped = open_target(target, _config(target, overrides), ranks)
    answer = _fuse(wrapped, target, asked.question, events, overrides, ranks)
    return {
        "video": asked.file,
        "question": asked.question,
        "answer": answer,
        "segments": [{"start_s": a, "end_s": b, "text": text} for a, b, text in events],
    }


def write_analysis(answer: dict[str, Any], out: Path) -> None:
    """Write the JSON answer as a whole."""
    replace_file(out, json.dumps(answer, ensure_ascii=False, indent=1) + "\n")


def format_analysis(answer: dict[str, Any]) -> str:
    """The answer for people, then what it was made of."""
    events = [Event(s["start_s"], s["end_s"], " ".join(s["text"].split())) for s in answer["segments"]]
    return f"{answer['answer']}\n\n{write_lines(events)}"


# -------------------------------------------------------------------------------------------------------- segments


def _config(target: Target, overrides: Sequence[str], data: str | None = None) -> Config:
    usual = USUAL | target.facts
    usual = {key: usual[key] for key in USUAL} | ({} if data is None else {"data.eval": data})
    return target_config(target, [*write_words(usual, overrides), *overrides], task="chat")


def _open_rows(target: Target, asked: Sequence[tuple[str, Any]], overrides: Sequence[str], ranks: Ranks):
    """Questions (id, content) as rows of a file, scanned; the same name for the same questions, so that what is known
    of them is found again."""
    lines = [{"id": name, "messages": [{"role": "user", "content": content}]} for name, content in asked]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path = cache_root() / "asked" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.jsonl"
    if ranks.local_rank == 0 and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    barrier()
    config = _config(target, overrides, str(path))
    try:
        return config, open_set(config, str(path), ranks, require_labels=False)
    except DataError as error:
        found = re.search(r"\d+ tokens, data.max_length is \d+", error.why or "")
        if found is None:
            raise
        remedy = "Raise data.max_length, or lower --segment, data.video.max_frames or data.video.pixels"
        raise UsageError("a segment is too long", why=found.group(), remedy=remedy) from None


def _answer_all(wrapped: Wrapped, rows: EvalSet, ranks: Ranks, config: Config, asked: Asked, key: str) -> list[str]:
    """The text of each segment, in order; those that are kept are not asked again."""
    known = gather_objects(_read_kept(asked.kept, key) if ranks.is_main else {})[0]
    ids = [row.id for row in rows.index.rows]
    left = tuple(row for row in rows.index.rows if row.id not in known)
    if left:
        rest = replace(rows, index=replace(rows.index, rows=left))
        # no more at a time than the largest takes: what is in memory does not grow, and answers are kept early
        how = replace(how_to_measure(config, ranks.device), micro_batch_tokens=max(row.tokens for row in left))
        progress = count_progress("segments", enabled=ranks.is_main)
        keep = None if asked.kept is None else _keeper(asked.kept, key)
        began = time.monotonic()
        known |= {i: text for i, text, *_ in generate_set(wrapped, rest, how, progress, keep)}
        if ranks.is_main:
            print(f"{len(left):,} segments answered in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return [known[i] for i in ids]


def _read_kept(path: Path | None, key: str) -> dict[str, str]:
    """Texts by id. A line that was cut off is closed, so that the next stands by itself."""
    if path is None or not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    if text and not text.endswith("\n"):
        _append(path, "\n")
    found = {}
    for line in text.splitlines():
        try:
            record = json.loads(line)
            if record["key"] == key:
                found[record["id"]] = record["text"]
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _keeper(path: Path, key: str) -> Callable[[str, str], None]:
    def keep(name: str, text: str) -> None:
        _append(path, json.dumps({"key": key, "id": name, "text": text}, ensure_ascii=False) + "\n")

    return keep


def _append(path: Path, text: str) -> None:
    """Add to a file in one piece: other ranks write to it too."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _identity(target: Target) -> list[Any]:
    """What tells that a model is the one that answered before."""
    places = [target.base, target.adapter, target.checkpoint and target.checkpoint.folder]
    return [[str(place), file_stamp(str(place))] for place in places if place is not None]


def _settings(config: Config) -> dict[str, Any]:
    kept = ("data.video", "data.pixels", "data.window", "eval.max_new_tokens", "train.precision")
    return {k: v for k, v in config.flat().items() if k.startswith(kept) and k != "data.video.cache_mb"}


# ------------------------------------------------------------------------------------------------------------ fuse


def _fuse(
    wrapped: Wrapped, target: Target, question: str, events: list[Event], overrides: Sequence[str], ranks: Ranks
) -> str:
    """One answer: of as many as fit into a prompt at a time, then of those answers, until there is one."""
    config = _config(target, overrides)
    encode = load_processor(resolve_model(config.model.path)).encode
    head = f"{FUSE}\n{question}\n"
    limit = config.data.max_length - config.eval.max_new_tokens - SLACK - len(encode(head))
    texts = [write_lines([event]) for event in events]
    while len(texts) > 1:
        groups = group_texts([len(encode(text)) + 1 for text in texts], limit)
        prompts = [(str(n), head + "\n".join(texts[i] for i in group)) for n, group in enumerate(groups)]
        config, rows = _open_rows(target, prompts, overrides, ranks)
        how = how_to_measure(config, ranks.device)
        texts = [text for _, text, *_ in generate_set(wrapped, rows, how)]
    return texts[0] if len(events) > 1 else events[0].text
