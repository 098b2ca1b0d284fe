"""A log of shown lists: what stood at which place, how likely that was, and what was clicked and bought.

    {"query_id": "q7", "shown": [{"doc_id": "d3", "position": 1, "click": 1, "conversion": 0, "propensity": 0.25}, ...]}

A line is one list that was shown once; the same query may come many times. `click` and `conversion` are 0 or 1,
`conversion` stands on every item of the log or on none. `propensity` is the probability with which the system that
wrote the log would show this item at this place for this query. It has to come from that system: it cannot be told
from what it happened to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litchi.data.values import is_number
from litchi.errors import DataError
from litchi.evaluate.trec import iterate_lines, read_object

KEYS = {"doc_id", "position", "click", "conversion", "propensity"}


@dataclass(frozen=True)
class ShownItem:
    """An item at its place, counted from 1. `conversion` and `propensity` are None where the log does not say."""

    doc_id: str
    position: int
    click: int
    conversion: int | None = None
    propensity: float | None = None


@dataclass(frozen=True)
class ShownList:
    """A list as it was shown once."""

    query_id: str
    items: tuple[ShownItem, ...]


def read_click_log(path: str | Path) -> list[ShownList]:
    """Read a log.

    Raises:
        DataError: a line is wrong; it names file and line.
    """
    lists = [_parse(read_object(text, f"{path}:{line}"), f"{path}:{line}") for line, text in iterate_lines(Path(path))]
    if not lists:
        raise DataError("the log has no lines", where=path, why="a line for each list that was shown is needed")
    told = {item.conversion is not None for shown in lists for item in shown.items}
    if len(told) > 1:
        raise DataError("conversion stands on some items and not on others", where=path, remedy="Write 0 where none is")
    return lists


def read_catalogue(path: str | Path) -> set[str]:
    """Read the items there are: `{"doc_id": ...}` lines, or one id a line. Raises DataError."""
    found: set[str] = set()
    for line, text in iterate_lines(Path(path)):
        name = read_object(text, f"{path}:{line}").get("doc_id") if text.startswith("{") else text
        if not isinstance(name, str) or not name:
            raise DataError("doc_id is missing", where=f"{path}:{line}", why="a string that is not empty is expected")
        found.add(name)
    if not found:
        raise DataError("the catalogue has no lines", where=path, why="a line for each item is needed")
    return found


def _parse(row: Mapping[str, Any], where: str) -> ShownList:
    query, shown = row.get("query_id"), row.get("shown")
    if not isinstance(query, str) or not query:
        raise DataError("query_id is missing", where=where, why="a string that is not empty is expected")
    if not isinstance(shown, list) or not shown:
        raise DataError("shown is missing", where=where, why="a list of the items that were shown is expected")
    items = tuple(_parse_item(item, where) for item in shown)
    for name in ("position", "doc_id"):
        if len({getattr(item, name) for item in items}) < len(items):
            raise DataError(f"a {name} stands twice in one list", where=where, why="each may stand once")
    return ShownList(query, items)


def _parse_item(item: Any, where: str) -> ShownItem:
    def refuse(name: str, expected: str) -> DataError:
        found = f"{name} is {item[name]!r}" if name in item else f"{name} is missing"
        return DataError(found, where=where, why=f"{expected} is expected")

    if not isinstance(item, dict):
        raise DataError(f"a shown item is {item!r}", where=where, why="an object is expected")
    if odd := sorted(item.keys() - KEYS):
        raise DataError(f"a shown item has {odd[0]!r}", where=where, why=f"its keys are {', '.join(sorted(KEYS))}")
    if not isinstance(item.get("doc_id"), str) or not item["doc_id"]:
        raise refuse("doc_id", "a string that is not empty")
    if type(item.get("position")) is not int or item["position"] < 1:
        raise refuse("position", "a whole number from 1")
    for name in ("click", "conversion"):
        if item.get(name) not in (0, 1, *((None,) if name == "conversion" else ())):
            raise refuse(name, "0 or 1")
    propensity = item.get("propensity")
    if propensity is not None and (not is_number(propensity) or not 0 < propensity <= 1):
        raise refuse("propensity", "a probability above 0")
    conversion = item.get("conversion")
    return ShownItem(
        doc_id=item["doc_id"],
        position=item["position"],
        click=int(item["click"]),
        conversion=None if conversion is None else int(conversion),
        propensity=None if propensity is None else float(propensity),
    )
