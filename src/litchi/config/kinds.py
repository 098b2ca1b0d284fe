"""What a setting's value may be (numbers, distances, lists), with words for what it takes, and a section of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, PlainValidator, model_validator


@dataclass(frozen=True)
class Says:
    """What a setting takes, in words, where its type alone does not tell."""

    text: str


@dataclass(frozen=True)
class Every:
    """A distance in steps or in epochs; exactly one of them."""

    steps: int | None = None
    epochs: int | None = None

    @classmethod
    def parse(cls, value: Any) -> Every:
        """Read `100`, `1 epoch` or `2 epochs`."""
        if isinstance(value, Every):
            return value
        if type(value) is int and value > 0:
            return cls(steps=value)
        if isinstance(value, str):
            number, _, word = value.partition(" ")
            if word in ("epoch", "epochs") and number.isdecimal() and int(number) > 0:
                return cls(epochs=int(number))
        raise ValueError(value)

    def written(self) -> int | str:
        """Write it as `parse` reads it."""
        return self.steps if self.steps else f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"

    def in_steps(self, steps_per_epoch: int) -> int:
        """Give the distance in steps."""
        return self.steps or (self.epochs or 0) * steps_per_epoch


def _as_list(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise ValueError(value)


def as_sections(value: Any) -> tuple[Any, ...]:
    """None, one section or a list of them, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, dict) else _as_list(value)


def stem(path: str) -> str:
    """Take folders and the known endings off a path: data/train.jsonl.gz -> train."""
    name = Path(path)
    while name.suffix in (".gz", ".zst", ".jsonl", ".json", ".parquet", ".tar"):
        name = name.with_suffix("")
    return name.name


def _as_pair(value: Any) -> tuple[Any, Any]:
    first, second = _as_list(value)
    return first, second


def _as_range(value: Any) -> tuple[int, int]:
    low, high = _as_pair(value)
    if type(low) is int and type(high) is int and 0 <= low < high <= 65535:
        return low, high
    raise ValueError(value)


def _weight(value: Any) -> float | str:
    if value == "balanced" or (type(value) in (int, float) and 0 < value < math.inf):
        return value
    raise ValueError(value)


def _unless(word: str) -> Callable[[Any], Any]:
    """Let a word stand for null."""
    return lambda value: None if value == word else value


def _warmup(value: Any) -> int | float:
    if (type(value) is int and value >= 0) or (type(value) is float and 0 <= value < 1):
        return value
    raise ValueError(value)


def _until(value: Any) -> int | float:
    if (type(value) is int and value > 0) or (type(value) is float and 0 < value <= 1):
        return value
    raise ValueError(value)


Positive = Annotated[int, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_list), Says("a list of names")]
Distance = Annotated[
    Every, PlainValidator(Every.parse), PlainSerializer(Every.written), Says("steps, or epochs as in `1 epoch`")
]
Warmup = Annotated[int | float, BeforeValidator(_warmup), Says("steps, or a fraction of the run below 1")]
Until = Annotated[int | float, BeforeValidator(_until), Says("a step, or a fraction of the run up to 1")]
Window = Annotated[tuple[int, int], BeforeValidator(_as_range), Says("[low, high] with 0 <= low < high <= 65535")]
Betas = Annotated[tuple[Decay, Decay], BeforeValidator(_as_pair), Says("[beta1, beta2], each from 0 to below 1")]
Weight = Annotated[Literal["balanced"] | float, BeforeValidator(_weight), Says("balanced, or a number above 0")]
Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]
Trackers = Annotated[tuple[Tracker, ...], BeforeValidator(_as_list)]
AutoTokens = Annotated[Positive | None, BeforeValidator(_unless("auto")), Says("auto (null), or tokens")]
Targets = Annotated[
    Annotated[tuple[str, ...], BeforeValidator(_as_list)] | None,
    BeforeValidator(_unless("all")),
    Says("all (null), or a list of module names"),
]


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    short: ClassVar[str | None] = None  # the key a bare word stands for, as in `loss: bce`

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        return cls.expand(value)

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Write out the short form. A section whose lines are all commented out (null) is an empty one."""
        if value is None:
            return {}
        return {cls.short: value} if cls.short and isinstance(value, str) else value
