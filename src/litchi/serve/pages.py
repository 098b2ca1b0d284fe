"""The files of the pages: a name -> its bytes, its type, and the headers that keep everything else out.

The playground is at `/` of `litchi serve`, a run's page at `/` of `litchi watch`; both take nothing from elsewhere.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def read_pages() -> dict[str, tuple[bytes, str]]:
    """Bytes and type of each file by its name. Only these names are answered: a path is never made of a request."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
    return {path.name: (path.read_bytes(), f"{TYPES[path.suffix]}; charset=utf-8") for path in files}
