"""`litchi serve`: words of the command line -> engines, limits, keys -> the server.

What is missing to serve is said before anything is loaded.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from litchi.config import load_config
from litchi.errors import MachineError, UsageError, UserError
from litchi.serve.jobs import EngineSpec
from litchi.serve.limits import KEYS, read_keys


def serve_target(
    name: str,
    overrides: Sequence[str],
    *,
    host: str,
    port: int,
    procs: int = 1,
    against: str | None = None,
    engine_url: str | None = None,
    key_file: str | None = None,
    hosts: Sequence[str] = (),
) -> None:
    """Serve a TARGET until a signal comes.

    Args:
        procs: engines, each with a model of its own; the n-th is on the n-th GPU, where there are GPUs.
        against: a second TARGET, such as the base, asked as the first one is; each has `procs` engines.
        engine_url: of a vLLM or SGLang that serves the TARGET, which is then not loaded here.
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
    if against == name:
        raise UsageError(f"--against {against} is TARGET itself", remedy="Name another model")
    if engine_url is not None and against is not None:
        raise UsageError("--against does not go with --engine-url", why="the engine there has one model")
    if engine_url is not None and not engine_url.startswith(("http://", "https://")):
        raise UsageError(f"--engine-url {engine_url}", why="an address such as http://127.0.0.1:8001 is needed")
    engines = procs if against is None else 2 * procs
    threads = max(1, (os.cpu_count() or 1) // engines) if engines > 1 else None
    specs = [EngineSpec(name, tuple(overrides), threads, url=engine_url)]
    if against is not None:
        specs.append(EngineSpec(against, tuple(overrides), threads, like=name))
    words = [word for word in overrides if word.startswith("serve")]  # the others are read with what TARGET brings
    limits = load_config(None, ["task=rerank", *words], need=()).serve
    run_server(
        run_engine, specs, host=host, port=port, procs=procs, limits=limits, keys=read_keys(key_file),
        hosts=frozenset(hosts),
    )  # fmt: skip


def run_engine(pipe: Any, spec: EngineSpec) -> None:
    """The whole life of an engine's process; it ends with the front's. The front never imports torch."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the front's to decide
        signal.signal(number, signal.SIG_IGN)
    open_engine: Callable[[Any, EngineSpec], Any]
    try:
        if spec.url is None:
            from litchi.serve.worker import open_worker as open_engine
        else:
            from litchi.serve.remote import open_relay as open_engine
        engine = open_engine(pipe, spec)
    except UserError as error:
        pipe.send(("failed", error))
        return
    except Exception as error:
        traceback.print_exc()
        what = "the model cannot be opened" if spec.url is None else "the engine cannot be asked"
        pipe.send(("failed", UserError(f"{what}: {type(error).__name__}: {error}")))
        return
    engine.run()
