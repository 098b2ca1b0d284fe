"""The verbs and their options as a page, docs/commands.md, made from the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer


def commands_markdown(app: typer.Typer) -> str:
    """Every verb with what it takes, in the order in which `litchi --help` lists them."""
    parts = [
        "# Commands\n\nMade from the command line itself by `litchi.cli.reference.commands_markdown()`; do not edit. "
        "`KEY=VALUE` overrides a [setting](settings.md). Every verb has `--help` and `--debug` (show the "
        "traceback of an error).\n"
    ]
    for name, command in walk_verbs(app):
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
        parts.append(f"## litchi {name}\n\n`litchi {name} {usage}`\n\n{_flow(command.help)}\n")
        records = [param.get_help_record(context) for param in command.params if param.name != "debug"]
        rows = [f"| `{names.replace('|', ', ')}` | {_flow(text)} |" for names, text in filter(None, records)]
        parts.append("\n".join(["| | |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def walk_verbs(app: typer.Typer) -> Iterator[tuple[str, Any]]:
    """(name, command) of every verb; one of a group has both names."""

    def below(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, one in command.commands.items():
            yield from below(one, (*names, name)) if hasattr(one, "commands") else [(" ".join((*names, name)), one)]

    yield from below(typer.main.get_command(app), ())


def _flow(text: str | None) -> str:
    """Lines of a text as paragraphs, for a cell of a table too."""
    return "\n\n".join(" ".join(one.split()) for one in (text or "").split("\n\n")).replace("|", "\\|")
