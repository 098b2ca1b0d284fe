"""Options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")]
Seed = Annotated[int, typer.Option("--seed", help="The same seed draws the same.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as in docs/settings.md.")
]
Procs = Annotated[int | None, typer.Option("--procs", min=1, help="Ranks to start; default: one per GPU, or one.")]
