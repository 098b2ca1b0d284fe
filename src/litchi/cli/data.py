"""The verbs of `litchi data`: one function each, no logic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from litchi.cli.options import AsJson, Debug, Seed
from litchi.errors import UsageError

data_app = typer.Typer(help="Check, convert, sample and split data.", no_args_is_help=True, rich_markup_mode=None)


@data_app.command("check")
def data_check(
    words: Annotated[list[str], typer.Argument(metavar="FILE... [KEY=VALUE]...")],
    task: Annotated[str | None, typer.Option("--task", help="rerank or chat; default: by the first row.")] = None,
    write_clean: Annotated[
        str | None, typer.Option("--write-clean", metavar="OUT", help="Write the usable rows.")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="DIR|FILE", help="Write a report: .html, .md, or a folder for both."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="FILE", help="Name rows that share contents with this file."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Parse every row, decode every picture, count every token, compare the rows."""
    from litchi.config import load_config
    from litchi.data.jsonl import guess_task
    from litchi.data.processor import load_processor
    from litchi.model.build import BUILTIN, resolve_model
    from litchi.prepare import check
    from litchi.prepare.check_report import check_out, write_report

    files, settings = _files_and_settings(words)
    settings += [] if any(w.startswith("task=") for w in settings) else [f"task={task or guess_task(files[0])}"]
    settings += [] if any(w.startswith("model.path=") for w in settings) else [f"model.path={BUILTIN}"]
    settings += [f"data.eval={json.dumps(against)}"] if against else []
    config = load_config(None, [f"data.train={json.dumps(files)}", *settings], need=("model.path", "data.train"))
    where = check_out(report) if report else None
    checked = check.check_files(config, load_processor(resolve_model(config.model.path)))
    answer = check.check_report(checked)
    print(check.to_json(answer) if as_json else check.format_report(answer))
    if write_clean:
        print(check.write_clean(checked, Path(write_clean), media_root=config.data.media_root), file=sys.stderr)
    if where:
        print(f"report: {', '.join(map(str, write_report(checked, answer, where)))}", file=sys.stderr)
    if any(f["severity"] == "error" for f in answer["findings"]):
        raise typer.Exit(3)


def _files_and_settings(words: list[str]) -> tuple[list[str], list[str]]:
    """Words that are files, and words that are settings; a file whose name has a `=` is still a file."""
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    files = [word for word in words if word not in settings]
    if not files:
        raise UsageError("no FILE is named", why=f"{words[0]} is a setting", remedy="litchi data check FILE...")
    return files, settings


@data_app.command("convert")
def data_convert(
    source: Annotated[str, typer.Argument(metavar="IN")],
    out: Annotated[str, typer.Argument(metavar="OUT", help=".jsonl, .json, .csv, .parquet or .tar")],
    read: Annotated[str | None, typer.Option("--from", metavar="FORMAT", help="Default: by the keys of IN.")] = None,
    write: Annotated[str | None, typer.Option("--to", metavar="FORMAT", help="Default: litchi.")] = None,
    media_root: Annotated[
        str | None, typer.Option("--media-root", metavar="DIR", help="Where paths in IN start; default: its folder.")
    ] = None,
    out_root: Annotated[
        str | None, typer.Option("--out-root", metavar="DIR", help="Where paths in OUT start; default: absolute.")
    ] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Count what FORMAT cannot hold instead of stopping.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn other tools' data into Litchi's and back; formats are in docs/data.md."""
    from litchi.prepare import convert

    where = {"media_root": media_root, "out_root": out_root}
    answer = convert.convert_file(source, out, read=read, write=write, lossy=lossy, **where)
    print(json.dumps(answer, ensure_ascii=False) if as_json else convert.format_answer(answer))


@data_app.command("sample")
def data_sample(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    out: Annotated[str, typer.Argument(metavar="OUT")],
    n: Annotated[int, typer.Option("-n", metavar="N", help="Rows to draw.")] = ...,  # type: ignore[assignment]
    seed: Seed = 0,
    stratify: Annotated[
        str | None, typer.Option("--stratify", metavar="FIELD", help="Keep its values' shares.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Draw rows of a file."""
    from litchi.prepare import sample

    answer = sample.sample_file(file, out, n, seed=seed, stratify=stratify)
    print(json.dumps(answer, ensure_ascii=False) if as_json else sample.format_answer(answer))


@data_app.command("split")
def data_split(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    out: Annotated[str, typer.Option("--out", metavar="DIR")] = ...,  # type: ignore[assignment]
    parts: Annotated[str, typer.Option("--parts", help="Names and shares.")] = "train=0.9,eval=0.1",
    folds: Annotated[int | None, typer.Option("--folds", min=2, help="So many train and eval files instead.")] = None,
    seed: Seed = 0,
    share_negatives: Annotated[
        bool, typer.Option("--share-negatives", help="Negatives may stand in several parts.")
    ] = False,
    media_root: Annotated[str | None, typer.Option("--media-root", metavar="DIR", help="Where paths start.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="rerank or chat; default: by the first row.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Split a file so that no query, product or picture is on both sides."""
    from litchi.data.jsonl import guess_task
    from litchi.prepare import split

    answer = split.split_file(
        file,
        out,
        task="chat" if (task or guess_task(file)) == "chat" else "rerank",
        parts=split.parse_parts(parts),
        folds=folds,
        seed=seed,
        share_negatives=share_negatives,
        media_root=media_root,
    )
    print(json.dumps(answer, ensure_ascii=False) if as_json else split.format_answer(answer))
