"""What may end a run from outside, a signal: before the first step at once, later between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from litchi.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last one is what clusters send before they take back


def stop_at_once(leave: Callable[[StoppedError], object]) -> None:
    """Until a `StopRequest` is open a signal ends this process: nothing is there that would have to be saved."""

    own = os.getpid()

    def act(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # forked for a part of the work, and without a word of its own
            os._exit(1)
        name = signal.Signals(number).name
        leave(StoppedError(f"stopped by {name} before its first step", remedy="The same command begins there again"))

    for number in SIGNALS:
        signal.signal(number, act)


class CutShort(Exception):
    """All ranks have agreed to stop in the middle of an evaluation."""


class StopRequest:
    """While it is open, signals are only noted, so that the step under way ends and the state is saved.

    A second SIGINT, from somebody impatient at a keyboard, acts as usual; a cluster may send several others. An error
    that follows a signal on one of several ranks is how a rank notices that the others were ended: it then ends as the
    signal would have ended it, without a word.
    """

    def __init__(self, *, alone: bool):
        self.alone = alone
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        ours = SIGNALS if threading.current_thread() is threading.main_thread() else ()  # in a thread Ray has them
        self._before = {number: signal.signal(number, self._note) for number in ours}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        echo = error is not None and not isinstance(error, StoppedError) and not self.alone
        if echo and self.signal is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM if self.signal is signal.SIGTERM else signal.SIGKILL)
