"""Settings as the rest of Litchi takes them: read strictly, checked as a whole, frozen.

    load_config("x.yaml", ["optim.lr=1e-4"]) -> Config          derive(config, samples=..., ...) -> Derived

reading.py reads YAML and `key=value`; sections.py has the settings; here they meet, and every problem is reported
at once with its file and line. None of this imports torch or transformers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from litchi.config.data import Data, DataSource, Pixels, Video
from litchi.config.kinds import Every
from litchi.config.later import LATER
from litchi.config.reading import Key, Reading, dotted, find_file, read_settings, show
from litchi.config.sections import (
    LOSSES,
    METRICS,
    SAME_NUMBERS,
    Config,
    Lora,
    Loss,
    Model,
    Parallel,
    Part,
    Task,
    Trainable,
    under,
)
from litchi.config.train import Eval, Optim, Stage, Train
from litchi.config.words import allowed, choices, fields, known_keys, nearest, section_of, settings_markdown

__all__ = [
    "Config",
    "Data",
    "DataSource",
    "Eval",
    "Every",
    "Lora",
    "Loss",
    "Model",
    "Optim",
    "Parallel",
    "Part",
    "Pixels",
    "Stage",
    "Task",
    "Train",
    "Trainable",
    "Video",
    "LOSSES",
    "METRICS",
    "LATER",
    "SAME_NUMBERS",
    "load_config",
    "known_keys",
    "nearest",
    "settings_markdown",
    "Derived",
    "derive",
    "resolve_micro_batch_tokens",
]

# ------------------------------------------------------------------------------------------------------- reading


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, need: Iterable[str] = ("model.path", "data.train")
) -> Config:
    """Read a YAML file, lay `key=value` over it, and check all of it.

    Args:
        path: the file, or `builtin:NAME`; None: from `overrides` alone.
        overrides: dotted keys with a value in YAML. A value replaces what the file has under its key.
        need: keys the verb cannot do without. With "data.train" among them the run must also have something to train.

    Raises:
        UsageError: with a line for every problem, each with its file and line or with the `key=value` it is about.
    """
    reading = read_settings(path, overrides, _expand)
    _prefer_command_line(reading)
    if path is not None:
        reading.tree.setdefault("output", f"runs/{find_file(path).stem}")
    config, wrong = _validate(reading)
    needed = tuple(need)
    for problem in (*_missing(config, needed), *_conflicts(config, training="data.train" in needed), *_later(config)):
        if not any(under(key, wrong) for key in problem.keys):
            reading.report(tuple(problem.keys[0].split(".")), problem.text)
    reading.raise_problems()
    return config


def _expand(at: Key, value: Any) -> Any:
    section = section_of(fields()[dotted(at)].annotation) if dotted(at) in fields() else None
    return section.expand(value) if section else {} if value is None else value


def _prefer_command_line(reading: Reading) -> None:
    """Let `train.steps=100` on the command line replace the epochs of the file, and the other way round."""
    train = reading.tree.get("train")
    if not isinstance(train, dict):
        return
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        late = reading.place(("train", given)).text and not reading.place(("train", other)).text
        if late and train.get(given) is not None:
            train.pop(other, None)


def _validate(reading: Reading) -> tuple[Config, set[str]]:
    """Build the Config without the settings that are wrong, which are reported and returned."""
    wrong: set[str] = set()
    while True:  # each turn takes a setting out or puts the task in
        try:
            return Config.model_validate(reading.tree), wrong
        except ValidationError as error:
            found = [_locate(reading.tree, e["loc"], e["type"]) for e in error.errors(include_url=False)]
        for at, kind in found:
            reading.report(at, _say(reading, at, kind))
        for at, kind in found:
            wrong.add(_take_out(reading.tree, at[:-1] if kind == "missing" and len(at) > 1 else at))
        if "task" in wrong:
            reading.tree["task"] = "rerank"  # so that the rest can be checked


def _locate(tree: Any, loc: Key, kind: str) -> tuple[Key, str]:
    """Find what the user wrote for a place in the expanded tree (`vision: lora` for vision.mode)."""
    at: Key = ()
    for key in loc:
        match tree, key:
            case dict(), int():
                continue  # one source that was not written as a list
            case (dict(), str()) if key in tree:
                tree, at = tree[key], (*at, key)
            case (list(), int()) if key < len(tree):
                tree, at = tree[key], (*at, key)
            case _:
                break
    return ((*at, loc[-1]) if kind == "missing" else at), kind


def _take_out(tree: dict[str, Any], at: Key) -> str:
    """Remove a setting, a list as a whole, and return its key."""
    names = tuple(itertools.takewhile(lambda key: isinstance(key, str), at))
    for key in names[:-1]:
        tree = tree.get(str(key), {})  # empty where another problem took the whole of it out
    tree.pop(str(names[-1]), None)
    return dotted(names)


def _say(reading: Reading, at: Key, kind: str) -> str:
    """Word a wrong key or value: what it is, and what is allowed."""
    key, place = dotted(at), reading.place(at)
    known_as = ".".join(part for part in at if isinstance(part, str))
    if kind == "extra_forbidden":
        near = nearest(known_as)
        if near == known_as:
            return f"{key}: dots are for the command line. In YAML write the groups, each on its own line"
        return f"{key}: no such setting. " + (f"Did you mean {near}?" if near else "docs/settings.md has them all")
    takes = allowed(known_as)
    if kind == "missing":
        return f"{key} is not given: {takes}"
    if kind == "string_type":
        takes += " (in quotes, so that it is not read as something else)"
    value: Any = reading.tree
    for part in at:
        value = value[part]
    return f"{place.text}: {takes}" if place.text and place.at == at else f"{key} is {show(value)}: {takes}"


# ------------------------------------------------------------------------------------------------ what fits what


class _Problem(NamedTuple):
    text: str
    keys: tuple[str, ...]  # the settings it is about; it is shown where the first was given


def _missing(config: Config, need: Iterable[str]) -> Iterator[_Problem]:
    flat = config.flat()
    for key in need:
        if not flat[key]:
            text = f"{key} is not given: {allowed(key)}. Add {key}=... to the command"
            yield _Problem(text, (key,))


def _conflicts(config: Config, *, training: bool) -> Iterator[_Problem]:
    """Find settings that do not go together."""
    train, data = config.train, config.data
    if train.steps is not None and train.epochs is not None:
        yield _Problem("train.steps and train.epochs are both given: give one of them", ("train.steps", "train.epochs"))
    yield from _loss_conflicts(config.task, config.loss)
    yield from _metric_conflicts(config)
    if config.task == "chat":
        yield from _generation_conflicts(config)
        for key, value in (("data.negatives", data.negatives), ("data.instruction", data.instruction)):
            if value is not None:
                yield _Problem(f"{key} is {show(value)}: it belongs to task rerank, not to chat", (key, "task"))
    elif data.video.segment_s is not None:
        text = f"data.video.segment_s is {data.video.segment_s:g}: labels of documents belong to whole videos"
        yield _Problem(f"{text}. Leave it at null, or set task to chat", ("data.video.segment_s", "task"))
    if data.pixels.min and data.pixels.max and data.pixels.min > data.pixels.max:
        text = f"data.pixels.min is {data.pixels.min}: at most data.pixels.max, {data.pixels.max}"
        yield _Problem(text, ("data.pixels.min", "data.pixels.max"))
    if data.pixels.total and data.pixels.min and data.pixels.min > data.pixels.total:
        text = f"data.pixels.total is {data.pixels.total}: at least data.pixels.min, {data.pixels.min}"
        yield _Problem(text, ("data.pixels.min", "data.pixels.total"))
    yield from _stage_conflicts(config.curriculum)
    names = [source.name for source in data.eval]
    for name in sorted({name for name in names if names.count(name) > 1}):
        text = f"data.eval has {names.count(name)} sets named {show(name)}: give each its own `name`"
        yield _Problem(text, ("data.eval",))
    if not data.shuffle and any(source.weight != 1 for source in data.train):
        yield _Problem("data.shuffle is false: data.train must then have no weights", ("data.shuffle", "data.train"))
    if config.model.placement == "spread":
        yield from _placement_conflicts(config)
    parts = {name: config.trainable.model_dump()[name] for name in ("vision", "merger", "language", "head")}
    for key, part in ((f"trainable.{name}", part) for name, part in parts.items()):
        if part["mode"] == "frozen" and part["lr"] is not None:
            yield _Problem(f"{key} is frozen: it takes no lr", (key,))
    if config.model.quantize != "none":
        held = f"model.quantize is {config.model.quantize}"
        if parts["language"]["mode"] == "full":
            text = f"{held}: packed weights cannot train. Set trainable.language to lora"
            yield _Problem(text, ("trainable.language", "model.quantize"))
        if config.parallel.tp > 1:
            text = f"{held}: packed weights cannot be cut by parallel.tp. Use parallel.dp_shard"
            yield _Problem(text, ("parallel.tp", "model.quantize"))
        if config.train.precision == "fp64":
            yield _Problem(f"{held}: not computed in fp64. Use fp32", ("train.precision", "model.quantize"))
    if config.trainable.lora.variant == "dora" and config.parallel.tp > 1:
        text = "trainable.lora.variant is dora: the norm of a weight's row is not known where parallel.tp cuts rows"
        yield _Problem(f"{text}. Use parallel.dp_shard", ("trainable.lora.variant", "parallel.tp"))
    for name in ("vision", "merger"):
        if config.parallel.vision_ranks and parts[name]["mode"] != "frozen":
            text = f"parallel.vision_ranks is {config.parallel.vision_ranks}: these ranks learn nothing"
            yield _Problem(f"{text}. Set trainable.{name} to frozen", ("parallel.vision_ranks", f"trainable.{name}"))
    yield from _feature_conflicts(config)
    if training:
        if all(part["mode"] == "frozen" for part in parts.values()):
            yield _Problem("trainable: every part is frozen, so nothing would be trained", ("trainable",))
        yield from _watching_conflicts(train, measured=bool(data.eval))


def _feature_conflicts(config: Config) -> Iterator[_Problem]:
    """Features are computed once where nothing that gives them changes, and by the ranks that use them."""
    if config.train.features == "off":
        return
    text = f"train.features is {config.train.features}"
    for name in ("vision", "merger"):
        mode = getattr(config.trainable, name).mode
        if mode != "frozen":
            yield _Problem(
                f"{text}: they change while trainable.{name} is {mode}. Set it to frozen, or train.features to off",
                ("train.features", f"trainable.{name}"),
            )
    if config.parallel.vision_ranks:
        yield _Problem(
            f"{text}: with parallel.vision_ranks those ranks compute them ahead. Leave one of the two out",
            ("train.features", "parallel.vision_ranks"),
        )


def _stage_conflicts(stages: Sequence[Stage]) -> Iterator[_Problem]:
    """Stages that cannot follow each other; a step against a fraction is decided once the run's length is known."""
    for number, stage in enumerate(stages, 1):
        if stage.pixels.min and stage.pixels.max and stage.pixels.min > stage.pixels.max:
            text = f"curriculum: in stage {number} pixels.min is {stage.pixels.min}: at most its pixels.max"
            yield _Problem(f"{text}, {stage.pixels.max}", ("curriculum",))
        before = [s.until for s in stages[: number - 1] if type(s.until) is type(stage.until)]
        if before and stage.until <= before[-1]:
            text = f"curriculum: stage {number} ends at {stage.until}, one before it at {before[-1]}"
            yield _Problem(f"{text}: let `until` rise from stage to stage", ("curriculum",))


def _placement_conflicts(config: Config) -> Iterator[_Problem]:
    """One process that takes all GPUs leaves none for other ranks."""
    for axis, size in config.parallel.model_dump().items():
        if isinstance(size, int) and size > 1:
            text = f"parallel.{axis} is {size}: model.placement=spread is for one process alone"
            yield _Problem(text, (f"parallel.{axis}", "model.placement"))


def _loss_conflicts(task: Task, loss: Loss) -> Iterator[_Problem]:
    if loss.name not in LOSSES[task]:
        text = f"loss.name is {show(loss.name)}: with task {task} one of {', '.join(LOSSES[task])}"
        yield _Problem(text, ("loss.name", "loss", "task"))
    for key, owner in (("weight", "bce"), ("temperature", "group_softmax"), ("margin", "pairwise")):
        value = loss.model_dump()[key]
        if loss.name != owner and value != Loss.model_fields[key].default:
            text = f"loss.{key} is {show(value)}: it belongs to {owner}, not to {loss.name}"
            yield _Problem(text, (f"loss.{key}", "loss", "task"))


def _metric_conflicts(config: Config) -> Iterator[_Problem]:
    known = METRICS[config.task]
    for name in config.eval.metrics or ():
        if not _is_metric(name, known):
            text = f"eval.metrics has {show(name)}: with task {config.task} one of {', '.join(known)}"
            yield _Problem(text, ("eval.metrics", "task"))
    best = config.train.best
    if best is not None and not _is_metric(best, (*known, "loss")):
        text = f"train.best is {show(best)}: with task {config.task} one of loss, {', '.join(known)}"
        yield _Problem(text, ("train.best", "task"))


def _generation_conflicts(config: Config) -> Iterator[_Problem]:
    """A cut stream and a pipeline give losses, but no answers to measure."""
    axes = [axis for axis in ("cp", "pp") if getattr(config.parallel, axis) > 1]
    named = {"eval.metrics": config.eval.metrics, "train.best": config.train.best}
    for key, value in named.items():
        if axes and value not in (None, "loss", ("loss",), ()):
            text = f"{key} is {show(value)}: it needs generated answers, which parallel.{axes[0]} > 1 does not give"
            yield _Problem(f"{text}: leave it out, and measure the run afterwards", (key, f"parallel.{axes[0]}"))


def _is_metric(name: str, known: Sequence[str]) -> bool:
    kind, at, cut = name.partition("@")
    if not at:
        return name in known
    return f"{kind}@k" in known and cut.isdecimal() and cut.isascii() and not cut.startswith("0")


def _watching_conflicts(train: Train, *, measured: bool) -> Iterator[_Problem]:
    """Check that what is decided by evaluations has them."""
    if train.best and not measured:
        yield _Problem(f"train.best is {show(train.best)}: it needs data.eval", ("train.best", "data.eval"))
    if train.early_stop and not (train.best and train.eval_every):
        text = f"train.early_stop is {train.early_stop}: it needs train.best and train.eval_every"
        yield _Problem(text, ("train.early_stop", "train.best", "train.eval_every"))
    if train.loss_spike and train.on_nonfinite != "rollback":
        text = f"train.loss_spike is {show(train.loss_spike)}: it needs train.on_nonfinite=rollback"
        yield _Problem(text, ("train.loss_spike", "train.on_nonfinite"))
    if train.on_nonfinite == "rollback" and train.save == "weights":
        text = "train.on_nonfinite is rollback: a checkpoint of train.save=weights has nothing to go back to"
        yield _Problem(f"{text}. Use train.save=all", ("train.on_nonfinite", "train.save"))


def _later(config: Config) -> Iterator[_Problem]:
    """Refuse, by name, settings whose part does not exist yet, and say what may be used now."""
    flat, usual = config.flat(), Config(task=config.task).flat()
    for key, (what, refused) in LATER.items():
        values = flat[key] if isinstance(flat[key], list) and refused else [flat[key]]
        for value in values:
            if value in refused if refused else value != usual[key]:
                shown = value if isinstance(value, str) else "[...]" if isinstance(value, list) else show(value)
                yield _Problem(
                    f"{key}={shown}: {what} is not part of this version yet; {_instead(key, config)}", (key,)
                )


def _instead(key: str, config: Config) -> str:
    refused = LATER[key].values
    if refused is None:
        usual = Config(task=config.task).flat()[key]
        return f"leave it {'empty' if usual == [] else f'at {usual}' if usual is not None else 'at null'}"
    words = LOSSES[config.task] if key == "loss.name" else choices(fields()[key].annotation)
    return f"use {' or '.join(word for word in words if word not in refused)}"


# ------------------------------------------------------------------------------------------------------- derived

MICRO_BATCH_TOKENS = {"cpu": 8192, "cuda": 16384}  # what `auto` stands for


def resolve_micro_batch_tokens(config: Config, device_type: str) -> int:
    """Give the tokens a rank takes at once: the setting, else 8192 on CPU and 16384 on a GPU.

    On CPU larger pieces are no faster and only cost memory; on a GPU smaller ones leave it idle.
    """
    return config.train.micro_batch_tokens or MICRO_BATCH_TOKENS[device_type]


@dataclass(frozen=True)
class Derived:
    """What follows from the settings, the data and the ranks."""

    unit: str  # what is counted: samples, or groups
    samples: int  # of an epoch
    global_batch_size: int
    steps_per_epoch: int
    steps: int
    epochs: int | None  # None: the steps were given
    warmup: int | float  # as set
    warmup_steps: int
    ranks: int  # that see different data
    mean_tokens: float  # of a sample
    micro_batch_tokens: int
    accumulation: int  # micro-batches of a rank in a step, about

    def lines(self) -> tuple[str, ...]:
        """Give each figure with its formula."""
        short = ", last one short" if self.samples % self.global_batch_size else ""
        epoch = f"({self.samples:,} {self.unit} / {self.global_batch_size:,}{short})"
        if self.epochs is None:
            passes = self.steps / self.steps_per_epoch
            steps = f"train.steps, {passes:.3g} epochs of {self.steps_per_epoch:,} {epoch}"
        else:
            steps = f"{self.epochs} epoch{'' if self.epochs == 1 else 's'} x {self.steps_per_epoch:,} {epoch}"
        share = isinstance(self.warmup, float)
        warmup = f"{100 * self.warmup:.4g} % of {self.steps:,}" if share else "optim.warmup"
        if self.warmup_steps > self.steps:
            warmup += ", longer than the run: the rate never reaches optim.lr"
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        return (
            f"steps {self.steps:,} = {steps}",
            f"warm-up {self.warmup_steps:,} = {warmup}",
            f"accumulation ~{self.accumulation:,} = {self.global_batch_size:,} {self.unit} x {self.mean_tokens:,.0f} "
            f"tokens / ({ranks} x {self.micro_batch_tokens:,} tokens a micro-batch)",
        )


def derive(config: Config, *, samples: int, ranks: int, mean_tokens: float, device_type: str = "cpu") -> Derived:
    """Work out steps, warm-up and accumulation.

    Args:
        config: the settings.
        samples: samples (rerank: groups) of an epoch, weights applied; at least one.
        ranks: ranks that see different data.
        mean_tokens: tokens of a sample on average.
        device_type: "cpu" or "cuda", for `train.micro_batch_tokens: auto`.
    """
    assert samples > 0 and ranks > 0
    train, warmup = config.train, config.optim.warmup
    steps_per_epoch = math.ceil(samples / train.global_batch_size)
    steps = train.steps if train.steps is not None else steps_per_epoch * (train.epochs or 1)
    micro = resolve_micro_batch_tokens(config, device_type)
    return Derived(
        unit="groups" if config.task == "rerank" else "samples",
        samples=samples,
        global_batch_size=train.global_batch_size,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        epochs=train.epochs,
        warmup=warmup,
        # through the decimal that was written: 0.07 x 100 is 7.000000000000001 in floats, and would give 8
        warmup_steps=warmup if isinstance(warmup, int) else math.ceil(Fraction(str(warmup)) * steps),
        ranks=ranks,
        mean_tokens=mean_tokens,
        micro_batch_tokens=micro,
        accumulation=max(1, math.ceil(train.global_batch_size * mean_tokens / (ranks * micro))),
    )
