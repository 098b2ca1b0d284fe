"""The settings in words: which keys there are, what each takes, and the page of the documentation."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from litchi.config.kinds import Says
from litchi.config.later import LATER
from litchi.config.reading import show
from litchi.config.sections import Config, Parallel, Part, Section

NAMES_ELSEWHERE = {  # what the settings are called in transformers, TRL, ms-swift and LLaMA-Factory
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "warmup_steps": "optim.warmup",
    "warmup_ratio": "optim.warmup",
    "max_grad_norm": "optim.clip",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "per_device_train_batch_size": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_checkpointing": "train.checkpoint_activations",
    "logging_steps": "train.log_every",
    "eval_steps": "train.eval_every",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep",
    "metric_for_best_model": "train.best",
    "cutoff_len": "data.max_length",
    "max_pixels": "data.pixels.max",
    "min_pixels": "data.pixels.min",
    "model_name_or_path": "model.path",
    "lora_rank": "trainable.lora.rank",
    "lora_alpha": "trainable.lora.alpha",
    "target_modules": "trainable.lora.targets",
    "output_dir": "output",
    "report_to": "track",
}


def known_keys() -> tuple[str, ...]:
    """List every dotted key there is, sections included; those of a list's items without their number."""
    return tuple(fields())


def nearest(key: str) -> str | None:
    """Find the known key a wrong one most likely stands for: by its name elsewhere, else the one most alike.

    Likeness is that of the whole plus that of the last word, less where one lies deeper: `train.lr` is optim.lr, not
    train.steps and not trainable.head.lr.
    """
    if (last := key.rpartition(".")[2].lower()) in NAMES_ELSEWHERE:
        return NAMES_ELSEWHERE[last]

    def likeness(known: str) -> float:
        parts = (key, known), (key.rpartition(".")[2], known.rpartition(".")[2])
        alike = sum(difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() for a, b in parts)
        same = 0.5 if key.rpartition(".")[2] == known.rpartition(".")[2] else 0.0
        return alike + same - 0.2 * abs(key.count(".") - known.count("."))

    best = max(known_keys(), key=likeness)
    return best if likeness(best) >= 1 else None


@cache
def fields() -> dict[str, FieldInfo]:
    """Give every key with its field, in the order of the documentation."""
    return dict(_walk(Config, ""))


def _walk(section: type[Section], above: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield above + name, info
        if inner := section_of(info.annotation):
            yield from _walk(inner, f"{above}{name}.")


def section_of(kind: Any) -> type[Section] | None:
    """Find the section in a type: itself, or that of its items."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return next((inner for part in get_args(kind) if (inner := section_of(part))), None)


def choices(kind: Any) -> tuple[str, ...]:
    """List the words of a type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(word for part in get_args(kind) for word in choices(part))


def allowed(key: str) -> str:
    """Say what a setting takes; for something inside it, what the whole takes."""
    while key not in fields():
        key = key.rpartition(".")[0]
    info = fields()[key]
    return _words(info.annotation, info.metadata)


def _words(kind: Any, notes: Sequence[Any] = ()) -> str:
    says = [note.text for note in notes if isinstance(note, Says)]
    if says:
        return says[-1]
    args, origin = get_args(kind), get_origin(kind)
    if origin is Annotated:
        return _words(args[0], (*args[1:], *notes))
    if NoneType in args:
        return f"{_words(next(a for a in args if a is not NoneType), notes)}, or null"
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple:
        return f"a list of {', '.join(choices(kind))}"
    return " ".join(filter(None, (_BASIC.get(kind, "a group of settings"), *map(_bound, notes))))


_BASIC = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _bound(note: Any) -> str:
    match note:
        case Gt(gt=low):
            return f"above {low}"
        case Ge(ge=low):
            return f"from {low}"
        case Lt(lt=high):
            return f"below {high}"
        case Le(le=high):
            return f"up to {high}"
    return ""


def settings_markdown() -> str:
    """Write `docs/settings.md`: every setting with its values, its default and its line of text."""
    lines = [
        "# Settings",
        "",
        "Made from the settings themselves by `litchi.config.settings_markdown()`; do not edit.",
        "A settings file is YAML; `key=value` on the command line comes on top of it, the value again in YAML.",
        "An unknown key or a wrong value stops the program before anything else happens, all of them at once.",
    ]
    lines += _table("The run", [(name, info) for name, info in fields().items() if _is_row(name) and "." not in name])
    for top, info in fields().items():
        if "." not in top and (section := section_of(info.annotation)):
            rows = [(key, info) for key, info in fields().items() if key.startswith(f"{top}.") and _is_row(key)]
            lines += _table(f"`{top}`", rows, section.__doc__ or "")
    return "\n".join(lines) + "\n"


def _is_row(key: str) -> bool:
    """Leave out plain sections, and what `data.eval` and three of the parts only repeat."""
    repeated = ("data.eval.", "trainable.merger.", "trainable.language.", "trainable.head.", "curriculum.pixels.")
    return not key.startswith(repeated) and allowed(key) != "a group of settings"


def _table(title: str, rows: Iterable[tuple[str, FieldInfo]], text: str = "") -> list[str]:
    lines = ["", f"## {title}", "", *([text, ""] if text else []), "| key | values | default | |", "|---|---|---|---|"]
    for key, info in rows:
        about = " ".join((info.description or "").split())
        if key in LATER:
            about += f" *Not yet: {', '.join(LATER[key].values or ('anything else',))}.*"
        lines.append(f"| `{key}` | {allowed(key)} | {_default(key, info)} | {about} |")
    return lines


def _default(key: str, info: FieldInfo) -> str:
    if info.is_required():
        return ""
    default = {"loss": "`bce`, chat `ce`", "loss.name": "`bce`, chat `ce`", "train.epochs": "1 without steps"}.get(key)
    if default:
        return default
    match info.default:
        case Part(mode=mode):
            return f"`{mode}`"
        case Parallel():
            return "`auto`"
        case "" | ():
            return ""
        case tuple() as several:
            return f"`[{', '.join(map(str, several))}]`"
        case str() as word:
            return f"`{word}`"
    return f"`{show(info.default)}`"
