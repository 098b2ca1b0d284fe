"""How a verb runs in ranks, and how a process of the command line speaks and ends."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from litchi.errors import MachineError, RestartError, StoppedError, UserError

if TYPE_CHECKING:
    from litchi.dist import Ranks


def in_ranks(procs: int | None, body: Callable[[Ranks], int | None], **supervision: Any) -> None:
    """Run a verb in the ranks a launcher made, or start `procs` ranks of it, supervised as `run_ranks` says."""
    from litchi.parallel.launch import follow_launcher, join_ranks, ranks_to_start, run_ranks

    follow_launcher()
    count = ranks_to_start(procs)
    if count > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # which libraries read when they are loaded
        load_libraries()
        raise typer.Exit(run_ranks([word for word in sys.argv[1:] if word != "--fresh"], count, **supervision))
    from litchi.dist import stop_ranks
    from litchi.model.build import quiet_libraries
    from litchi.parallel.heartbeat import Heartbeat

    quiet_libraries()
    ranks = join_ranks()
    with Heartbeat(ranks, _lost):
        status = body(ranks)
    stop_ranks()
    if status:
        raise typer.Exit(status)


def load_libraries() -> None:
    """Import once what every rank needs, for ranks are copies of this process."""
    import gc

    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl

    import litchi.train.loop

    assert litchi.train.loop and transformers
    gc.freeze()  # no collection of a rank looks through all that, and copies it by that


def _lost(error: RestartError | None) -> NoReturn:
    """End a process from a thread, while its main thread waits for what does not come."""
    end_now(error or RestartError("said by another rank"), said=error is None)


def end_now(error: UserError, *, said: bool = False) -> NoReturn:
    """End this process from wherever it is; a launcher says itself that it was stopped."""
    if not said and not said_by_launcher(error):
        print(f"error: {error.line()}", file=sys.stderr, flush=True)
    end_children()
    os._exit(exit_status(error))


def said_by_launcher(error: UserError) -> bool:
    """Whether the parent says it: that a rank was stopped, which it was because the parent, or another rank, was."""
    return isinstance(error, StoppedError) and not {"LITCHI_LAUNCHER", "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ)


def speak(text: str, *, echo: bool = False) -> None:
    """Say an error once for all ranks: rank 0 at once, another if nobody has ended it all two seconds later.

    Args:
        text: the error.
        echo: it may only be what a rank notices when another has ended, which is the one to hear.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    time.sleep(2.0 * (rank > 0) + 4.0 * (echo and world > 1))
    if "--debug" in sys.argv and sys.exc_info()[0]:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr, flush=True)


def leave(status: int) -> NoReturn:
    """End the process; a rank does not wait for peers that may hang in a collective."""
    end_children()
    if "RANK" in os.environ:
        os._exit(status)
    sys.exit(status)


def end_children() -> None:
    """Leave the terminal as it was found."""
    for child in multiprocessing.active_children():  # loader workers, which would hold the terminal for seconds
        child.kill()
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the cursor, which a live line that was cut off has hidden
    sys.stdout.flush()
    sys.stderr.flush()


def exit_status(error: UserError) -> int:
    """An error's exit status. That ranks should start again is told to a launcher that does so, and to nobody else."""
    if isinstance(error, RestartError) and "LITCHI_LAUNCHER" not in os.environ:
        return MachineError.status
    return error.status
