"""The verbs that serve: one function each, no logic."""

from __future__ import annotations

from typing import Annotated

import typer

from litchi.cli.options import Debug, Overrides


def serve(
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    procs: Annotated[int, typer.Option("--procs", min=1, help="Engines, each with a model of its own.")] = 1,
    against: Annotated[
        str | None, typer.Option("--against", metavar="TARGET", help="A second model beside it, such as the base.")
    ] = None,
    engine_url: Annotated[
        str | None, typer.Option("--engine-url", metavar="URL", help="A vLLM or SGLang that has the model: ask it.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option("--api-key-file", metavar="FILE", help="A key on each line; also LITCHI_API_KEYS.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="HOST", help="Fetch pictures from https://HOST.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve scores and answers over HTTP."""
    from litchi.serve.start import serve_target

    serve_target(
        target,
        overrides or [],
        host=host,
        port=port,
        procs=procs,
        against=against,
        engine_url=engine_url,
        key_file=api_key_file,
        hosts=allow_host or [],
    )


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8001,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the page as it is now, and end.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show a run in the browser: loss, rate, throughput, memory, evaluations, events, skipped samples."""
    from litchi.serve.watch import watch_run, write_snapshot

    if html is None:
        watch_run(run, port=port)
    else:
        write_snapshot(run, html)
        print(f"written: {html}")
