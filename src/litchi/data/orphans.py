"""A process that works for another ends with it, whatever ended that: ranks with their launcher, loaders with ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
WATCH_S = 0.5


def end_with_parent(parent: int) -> None:
    """Let the system kill this process as soon as its parent is gone (on Linux).

    Args:
        parent: process id of the parent as it was when this process was started; it may be gone already.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def watch_parent(parent: int) -> None:
    """Let a thread end this process soon after its parent. For a child of whichever thread needed it first: the
    system would take the end of that thread for the parent's.

    Args:
        parent: as above.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
