"""What may end a run from outside: a signal, noted at once and acted upon between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from litchi.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While it is open, the first signal is only noted, so that the step under way ends and the state is saved.

    A second signal acts as usual. An error that follows a signal on one of several ranks is how a rank notices that
    the others were ended: it then ends as the signal would have ended it, without a word.
    """

    def __init__(self, *, alone: bool):
        self.alone = alone
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        ours = SIGNALS if threading.current_thread() is threading.main_thread() else ()  # in a thread Ray has them
        self._before = {number: signal.signal(number, self._note) for number in ours}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._restore()
        echo = error is not None and not isinstance(error, StoppedError) and not self.alone
        if echo and self.signal is not None:
            os.kill(os.getpid(), signal.SIGKILL if self.signal is signal.SIGINT else self.signal)
