"""What two rows have in common, whatever their files are called: numbers for texts, pictures, queries and documents.

In: parts of a `Sample`. Out: whole numbers of 64 bits, equal for equal content. A picture counts by the bytes of its
file, never by its path. At a million different contents the chance that any two share a number is 3e-8.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from litchi.data.media import media_paths
from litchi.types import Box, ChatSample, Content, Media, RerankSample, Sample

CHUNK_BYTES = 2**20


def key_of(*parts: str | int | float | None) -> int:
    """One number for a sequence of texts and numbers."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        body = repr(part).encode("utf-8", "surrogatepass")  # quotes keep ("a", "bc") and ("ab", "c") apart
        digest.update(len(body).to_bytes(4, "big") + body)
    return int.from_bytes(digest.digest(), "big")


def plain_text(text: str) -> str:
    """A text as it is compared between files: full-width letters, case and white space do not tell texts apart."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def media_key(media: Media) -> int:
    """A number for the bytes of a picture or video, and what part of it is meant. Without a file: for its name."""
    if not media.cut:
        return _bytes_key(media.data) if media.data is not None else _file_key(media.path or "")
    own = [_bytes_key(media.data)] if media.data is not None else [_file_key(p) for p in media_paths(media)]
    return key_of(*own, media.cut)


def _bytes_key(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@lru_cache(maxsize=65_536)  # a file is read once, and memory does not grow with the number of pictures
def _file_key(path: str) -> int:
    digest = hashlib.blake2b(digest_size=8)
    try:
        if os.path.isdir(path):  # a video as a folder of frames
            return key_of(*(_file_key(os.path.join(path, name)) for name in sorted(os.listdir(path))))
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError:
        return key_of("no file", path)
    return int.from_bytes(digest.digest(), "big")


def media_keys(media: Iterable[Media]) -> list[int]:
    """Numbers of several, in their order."""
    return [media_key(one) for one in media]


def content_key(content: Content, *, plain: bool = False) -> int:
    """A number for a query or a document. `plain`: its text is compared as `plain_text`."""
    text = plain_text(content.text) if plain else content.text.strip()
    return key_of(text, *media_keys(content.media))


def turn_keys(sample: ChatSample, *, plain: bool = False) -> list[int]:
    """A number for each turn: role, texts and pictures in their order."""
    read = plain_text if plain else str
    return [
        key_of(turn.role, *(read(p) if isinstance(p, str) else _part_key(p) for p in turn.parts))
        for turn in sample.turns
    ]


def _part_key(part: Media | Box) -> int:
    return key_of("box", media_key(part.media), *part.at) if isinstance(part, Box) else media_key(part)


def query_key(sample: Sample) -> int:
    """A number for what is asked: the query with its pictures, or all that users say in a conversation."""
    if isinstance(sample, RerankSample):
        return content_key(sample.query, plain=True)
    said = [key for key, turn in zip(turn_keys(sample, plain=True), sample.turns, strict=True) if turn.role == "user"]
    return key_of(*said)


def is_named(document_id: str, place: int) -> bool:
    """Whether a document has an id of its own, and not the one its place gave it."""
    return document_id != f"d{place}"
