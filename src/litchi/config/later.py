"""Settings of parts that do not exist yet: refused by name. Whoever builds the part takes its line out."""

from __future__ import annotations

from typing import NamedTuple


class Later(NamedTuple):
    """A setting of a part that does not exist yet."""

    what: str
    values: tuple[str, ...] | None = None  # the refused ones; None: all but the default


LATER = {
    "parallel.pp_schedule": Later("several runs of layers on a stage", ("interleaved", "zero_bubble")),
    "track": Later("a tracker other than tensorboard", ("trackio", "wandb", "mlflow")),
}
