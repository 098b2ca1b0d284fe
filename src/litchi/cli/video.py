"""The verbs of `litchi video`: one function each, no logic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from litchi.cli.options import AsJson, Debug, Overrides, Procs
from litchi.cli.ranks import in_ranks

if TYPE_CHECKING:
    from litchi.dist import Ranks

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


@video_app.command("analyze")
def video_analyze(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    overrides: Overrides = None,
    question: Annotated[str, typer.Option("--question", metavar="TEXT", help="What is asked of each segment.")] = ...,  # type: ignore[assignment]
    target: Annotated[str, typer.Option("--target", metavar="TARGET", help="The model that looks.")] = ...,  # type: ignore[assignment]
    segment: Annotated[float, typer.Option("--segment", metavar="S", min=0.1, help="Seconds of one at most.")] = 300.0,
    scenes: Annotated[bool, typer.Option("--scenes", help="Cut at scene changes first.")] = False,
    fuse: Annotated[
        str | None,
        typer.Option("--fuse", metavar="TARGET", help="The model that fuses; default: the same."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="The JSON answer; a run that was stopped goes on."),
    ] = None,
    procs: Procs = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Answer a question about a long video: segment by segment, then as a whole."""

    def body(ranks: Ranks) -> None:
        from litchi.train.analyze import Asked, analyze_video, format_analysis, write_analysis

        asked = Asked(file, question, segment, scenes, fuse, None if out is None else Path(out))
        answer = analyze_video(asked, target, overrides or [], ranks)
        if ranks.is_main:
            if asked.out is not None:
                write_analysis(answer, asked.out)
            print(json.dumps(answer, ensure_ascii=False) if as_json else format_analysis(answer))

    in_ranks(procs, body)
