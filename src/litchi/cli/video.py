"""The verbs of `litchi video`: one function each, no logic."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from litchi.cli.options import AsJson, Debug

video_app = typer.Typer(help="Look at videos.", no_args_is_help=True, rich_markup_mode=None)


@video_app.callback()
def video() -> None:
    """Look at videos."""


@video_app.command("scenes")
def video_scenes(
    file: Annotated[str, typer.Argument(metavar="FILE")], as_json: AsJson = False, debug: Debug = False
) -> None:
    """Find the hard cuts of a video: a line for each scene, its begin and its end."""
    from litchi.data.scenes import find_scenes

    scenes = find_scenes(file)
    if as_json:
        print(json.dumps({"scenes": [{"start_s": start, "end_s": end} for start, end in scenes]}))
        return
    for scene in scenes:
        print("  ".join(f"{at // 3600:.0f}:{at // 60 % 60:02.0f}:{at % 60:06.3f}" for at in scene))
