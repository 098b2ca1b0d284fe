"""`litchi serve`: words of the command line -> engines, limits, keys -> the server.

What is missing to serve is said before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from litchi.config import load_config
from litchi.errors import MachineError, UsageError
from litchi.serve.jobs import EngineSpec
from litchi.serve.limits import KEYS, read_keys


def serve_target(
    name: str,
    overrides: Sequence[str],
    *,
    host: str,
    port: int,
    procs: int = 1,
    key_file: str | None = None,
    hosts: Sequence[str] = (),
) -> None:
    """Serve a TARGET until a signal comes.

    Args:
        procs: engines, each with a model of its own; the n-th is on the n-th GPU, where there are GPUs.
        key_file: a file with an API key on each line.
        hosts: that pictures may be fetched from.

    Raises:
        UserError: the server cannot be started.
    """
    try:
        from litchi.serve.server import run_server
    except ModuleNotFoundError as error:
        raise MachineError(
            f"{error.name} is missing", why="serving needs the extra `serve`", remedy="pip install 'litchi[serve]'"
        ) from None
    for allowed in hosts:
        if not allowed or any(letter in allowed for letter in "/:@*") or allowed != allowed.lower():
            raise UsageError(f"--allow-host {allowed}", why="a name such as images.example.org is needed")
    if key_file is None and KEYS in os.environ and not read_keys(None):
        raise UsageError(f"{KEYS} has no key", remedy="Unset it, or write keys separated by commas")
    threads = max(1, (os.cpu_count() or 1) // procs) if procs > 1 else None
    spec = EngineSpec(name, tuple(overrides), threads)
    words = [word for word in overrides if word.startswith("serve")]  # the others are read with what TARGET brings
    limits = load_config(None, ["task=rerank", *words], need=()).serve
    run_server(
        run_engine, spec, host=host, port=port, procs=procs, limits=limits, keys=read_keys(key_file),
        hosts=frozenset(hosts),
    )  # fmt: skip


def run_engine(pipe: Any, spec: EngineSpec) -> None:
    """What an engine's process runs; the front never imports torch."""
    from litchi.serve.worker import run_worker

    run_worker(pipe, spec)
