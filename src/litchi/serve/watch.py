"""`litchi watch`: a run's folder -> its page, live at an address of this machine or as one file.

The page asks `/data` for what was added since its last mark. Files are only read; nobody writes for the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from litchi.errors import MachineError, UsageError
from litchi.serve.pages import HEADERS, read_pages

FILES = ("metrics", "eval", "events", "quarantine")
PIECE_BYTES = 2**22  # of a file in one answer; what is left comes with the next
SNAPSHOT_STEPS = 4000  # a longer run is thinned in a snapshot, and the page says so
LIVE_S = 120.0  # a run that has written nothing for longer is called quiet
KEPT = ("step", "epoch", "loss", "grad_norm", "lr", "tokens_per_s", "peak_bytes", "step_s", "data_wait_s", "skipped")
PAGES = {"/": "watch.html", "/page/page.css": "page.css", "/page/watch.js": "watch.js"}
HOSTS = ("127.0.0.1", "localhost", "::1")


def read_added(path: Path, mark: str = "") -> tuple[str, bool, list[Any], bool]:
    """Read the whole lines that were added behind a mark.

    Returns:
        the new mark; whether the file is another one than the mark's, so that what is known of it must go (a resume
        cuts files back); the records, a line that is not JSON as `{"unreadable": TEXT}`; whether more is there.
    """
    identity, _, place = mark.partition("-")
    try:
        with path.open("rb") as file:
            now = str(path.stat().st_ino)
            size = file.seek(0, 2)
            start = int(place) if identity == now and place.isdecimal() and int(place) <= size else 0
            file.seek(start)
            piece = file.read(PIECE_BYTES)
    except FileNotFoundError:
        return "", bool(mark), [], False
    whole = piece[: piece.rfind(b"\n") + 1]
    records = [_record(line) for line in whole.splitlines()]
    end = start + len(whole)
    return f"{now}-{end}", start == 0 and bool(mark), records, bool(whole) and end < size


def _record(line: bytes) -> Any:
    try:
        found = json.loads(line)
        return found if isinstance(found, dict) else {"unreadable": line.decode(errors="replace")}
    except ValueError:
        return {"unreadable": line.decode(errors="replace")}


def read_run(run: Path, marks: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the page gets: the run's name and state, and for each file its mark, whether to start anew, its records."""
    answer: dict[str, Any] = {"name": run.resolve().name, "more": False, **read_state(run)}
    for name in FILES:
        mark, anew, records, more = read_added(run / f"{name}.jsonl", (marks or {}).get(name, ""))
        if name == "metrics":
            records = [{k: r[k] for k in (*KEPT, "unreadable") if k in r} for r in records]
        answer[name] = {"mark": mark, "anew": anew, "records": records}
        answer["more"] |= more
    return answer


def read_state(run: Path) -> dict[str, Any]:
    """Steps and epochs it is to take (None: not said), whether it has finished, seconds since its last line."""
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        settings = {}
    train = settings.get("train") or {} if isinstance(settings, dict) else {}
    try:
        quiet_s: float | None = max(0.0, time.time() - (run / "metrics.jsonl").stat().st_mtime)
    except FileNotFoundError:
        quiet_s = None
    finished = (run / "done.json").exists()
    state = "finished" if finished else "starting" if quiet_s is None else "running" if quiet_s < LIVE_S else "quiet"
    return {"state": state, "quiet_s": quiet_s, "steps": train.get("steps"), "epochs": train.get("epochs")}


def check_run(run: Path) -> None:
    """Raises UsageError when that is no run's folder."""
    if not run.is_dir():
        raise UsageError(f"no run at {run}", why="there is no such folder", remedy="Name the run's `output` folder")
    if not any((run / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        raise UsageError(f"no run at {run}", why="the folder has neither config.yaml nor metrics.jsonl")


# ---------------------------------------------------------------------------------------------------- one file


def format_snapshot(run: Path) -> str:
    """The page of a run as it is now, in one file that needs no other. Raises UsageError."""
    check_run(run)
    data = read_run(run)
    while data["more"]:
        added = read_run(run, {name: data[name]["mark"] for name in FILES})
        for name in FILES:
            before = [] if added[name]["anew"] else data[name]["records"]
            added[name]["records"] = before + added[name]["records"]
        data = added
    records = data["metrics"]["records"]
    every = -(-len(records) // SNAPSHOT_STEPS)
    if every > 1:
        data["metrics"]["records"] = [r for i, r in enumerate(records, 1) if i % every == 0 or r.get("skipped")]
        data["every"] = every
    data["taken"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    css, script = (read_pages()[name][0].decode() for name in ("page.css", "watch.js"))
    policy = f"default-src 'none'; img-src data:; script-src {_source(script)}; style-src {_source(css)}"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    written = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no record can end the element
    page = read_pages()["watch.html"][0].decode()
    for old, new in (
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}'),
        ('<link rel="stylesheet" href="page/page.css">', f"<style>{css}</style>"),
        ('<script src="page/watch.js" defer></script>', ""),
        ("</body>", f'<script type="application/json" id="data">{written}</script>\n<script>{script}</script></body>'),
    ):  # fmt: skip
        before, found, after = page.partition(old)
        assert found, old
        page = before + new + after
    return page


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_snapshot(run: str, file: str) -> None:
    """Write the page of a run into a file. Raises UserError."""
    page = format_snapshot(Path(run))
    try:
        Path(file).write_text(page, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"cannot write {file}", why=error.strerror) from None


# ---------------------------------------------------------------------------------------------------- an address


def make_server(run: Path, port: int) -> ThreadingHTTPServer:
    """A server of the page, on this machine only. Raises UserError: no run, or the port is taken."""
    check_run(run)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "litchi", ""

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            host = urlsplit(f"//{self.headers.get('host', '')}").hostname
            if host not in HOSTS:  # a foreign name that was made to point here
                self.reply(403, b"only by the name of this machine\n", "text/plain")
            elif asked.path == "/data":
                data = read_run(run, dict(parse_qsl(asked.query)))
                self.reply(200, json.dumps(data, ensure_ascii=False).encode(), "application/json")
            elif asked.path in PAGES:
                self.reply(200, *read_pages()[PAGES[asked.path]])
            else:
                self.reply(404, b"there is nothing at this path\n", "text/plain")

        def reply(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            for name, value in {**HEADERS, "content-type": kind, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Nothing: the page asks every two seconds."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise MachineError(
            f"cannot listen on 127.0.0.1:{port}", why=error.strerror, remedy="Choose another with --port"
        ) from None


def watch_run(run: str, *, port: int) -> None:
    """Serve the page of a run until the keyboard's interrupt. Raises UserError."""
    with make_server(Path(run), port) as server:
        print(f"watching {run} on http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()
