"""Answers as they grow: tokens of a pass -> text that can be shown, and why an answer ended.

Text is held back while it may still change: half a letter, or what may become one of the texts that end an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"


class Growing:
    """One answer.

    Args:
        decode: ids -> text.
        limit: tokens at most.
        stops: texts that end it, and are left out.
    """

    def __init__(self, decode: Callable[[list[int]], str], limit: int, stops: Sequence[str]):
        self.decode, self.limit, self.stops = decode, limit, stops
        self.ids: list[int] = []
        self.text = ""
        self.shown = 0
        self.reason: str | None = None

    def add(self, token: int | None) -> str:
        """Take in a token, None for the one that ends an answer; returns the text that can be shown now."""
        if token is None:
            self.reason = "stop"
        else:
            self.ids.append(token)
            self.text = self.decode(self.ids)
            found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
            if found:
                self.text, self.reason = self.text[: min(found)], "stop"
            elif len(self.ids) >= self.limit:
                self.reason = "length"
        end = len(self.text) if self.reason else self._settled()
        new, self.shown = self.text[self.shown : end], max(self.shown, end)
        return new

    def _settled(self) -> int:
        """How much of the text stays as it is whatever comes."""
        end = len(self.text.rstrip(HALF))
        for stop in self.stops:
            for length in range(min(len(stop) - 1, end), 0, -1):
                if self.text[:end].endswith(stop[:length]):
                    end -= length
                    break
        return end
