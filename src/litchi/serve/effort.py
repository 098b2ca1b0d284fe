"""What a request will take, before anyone has computed it: from what it holds, and from what such things took lately.

job -> effort, in tokens; requests that were answered -> the pace of an engine -> seconds that a new one would wait

Rough on purpose: the front opens no picture. What matters is that a hundred photographs do not count as a hundred
words, and that the pace is what the engine really has, with all that shares its cores.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from litchi.serve.jobs import ChatJob, Job
from litchi.types import Content, Media

LETTERS = 4  # of a token, about
PROMPT = 8  # tokens of a template that come with each text
TOKEN_PIXELS = 784  # 28 x 28
PICTURE = 3  # a token of a picture goes through the vision tower too, as four patches
DECODED = 8192  # pixels that are decoded in the time of a token
BYTE_PIXELS = 4  # pixels of a byte of a photograph, about
KEPT = 0.95  # of what is known of the pace, with each request that is answered


def effort(job: Job, most_pixels: int) -> float:
    """What a job takes, in tokens.

    Args:
        most_pixels: of a picture as the model sees it.
    """
    if isinstance(job, ChatJob):
        parts = [part for turn in job.sample.turns for part in turn.parts]
        texts = [part for part in parts if isinstance(part, str)]
        media = [part for part in parts if isinstance(part, Media)]
        more = job.max_tokens
    else:
        contents: list[Content] = [sample.query for sample in job.samples]
        contents += [document.content for sample in job.samples for document in sample.documents]
        texts, media, more = [one.text for one in contents], [one for c in contents for one in c.media], 0
    words = sum(PROMPT + len(text) / LETTERS for text in texts)
    return more + words + sum(_see(one, most_pixels) for one in {one.key: one for one in media}.values())


def _see(media: Media, most_pixels: int) -> float:
    pixels = guess_pixels(media.data or b"")
    return PICTURE * min(pixels, most_pixels) / TOKEN_PIXELS + pixels / DECODED


def guess_pixels(data: bytes) -> int:
    """Pixels of a picture: as a PNG says, of others by their bytes."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return width * height
    return BYTE_PIXELS * len(data)


@dataclass
class Pace:
    """How fast an engine is, by what it answered lately: sums over its last requests, the older ones fading."""

    busy_s: float = 0.0
    effort: float = 0.0
    requests: float = 0.0

    def see(self, busy_s: float, effort: float) -> None:
        """A request was answered; the engine was busy for so long since the one before."""
        self.busy_s = KEPT * self.busy_s + busy_s
        self.effort = KEPT * self.effort + effort
        self.requests = KEPT * self.requests + 1

    @property
    def effort_s(self) -> float:
        """Seconds of one token's effort; 0 where nothing was answered yet."""
        return self.busy_s / self.effort if self.effort else 0.0

    @property
    def request_s(self) -> float:
        """Seconds of a usual request."""
        return self.busy_s / self.requests if self.requests else 0.0
