"""Every machine must be able to read the data: a share that is not mounted on one is found before step 1, by name.

The scan would find it too, as thousands of missing pictures in the rows that happened to fall to that machine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence

from litchi.dist import Ranks, gather_objects
from litchi.errors import MachineError

SAMPLE = 20  # paths each machine opens

Open = Callable[[str], None]


def spread_sample(paths: Iterable[str], count: int = SAMPLE) -> list[str]:
    """At most `count` different paths, evenly spread over all of them in order, the first and the last included."""
    found = sorted(set(paths))
    if len(found) <= count:
        return found
    return [found[i * (len(found) - 1) // (count - 1)] for i in range(count)]


def open_path(path: str) -> None:
    """Read the first byte: a stale mount still lists its files."""
    with open(path, "rb") as file:
        file.read(1)


def try_paths(paths: Sequence[str], open_one: Open = open_path) -> dict[str, str]:
    """path -> why it cannot be read, for those that cannot."""
    failed = {}
    for path in paths:
        try:
            open_one(path)
        except OSError as error:
            failed[path] = error.strerror or str(error)
    return failed


def refuse_unreachable(paths: Sequence[str], tried: Sequence[tuple[str, dict[str, str]] | None]) -> None:
    """Decide, alike on all ranks.

    Args:
        paths: what every machine tried to read.
        tried: (host, what failed there) for a rank of each machine, None for the others.

    Raises:
        MachineError: a machine cannot read what another can. What none can is not the machine's fault, and is for
            the scan to say.
    """
    machines = [found for found in tried if found is not None]
    lost = {path for path in paths if all(path in failed for _, failed in machines)}
    for host, failed in machines:
        mine = [path for path in failed if path not in lost]
        if mine:
            raise MachineError(
                f"{host} cannot read {mine[0]}",
                where=f"{len(mine)} of the {len(paths)} files tried; another machine reads "
                f"{'it' if len(mine) == 1 else 'them'}",
                why=failed[mine[0]],
                remedy="Mount the data there under the same path, or set data.media_root to where all machines have it",
            )


def check_reach(paths: Iterable[str], ranks: Ranks) -> None:
    """Let the first rank of every machine open a sample of the paths; see `refuse_unreachable`."""
    sample = spread_sample(paths)
    own = (socket.gethostname(), try_paths(sample)) if ranks.local_rank == 0 else None
    refuse_unreachable(sample, gather_objects(own))
