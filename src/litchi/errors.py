"""What Litchi says to its user when it cannot go on: one line, and the exit status that belongs to it.

`error: what (where): why. remedy` is the only form; `cli/` prints it and exits with `status`.
Errors of ours that a user can do nothing about stay plain exceptions and `assert`s.
"""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. Status 1: it failed, or a gate was not passed.

    Args:
        what: the thing that is wrong, with the value found.
        where: file, line, setting or rank.
        why: what is allowed or expected instead.
        remedy: what to do now.
    """

    status = 1

    def __init__(self, what: str, *, where: object = None, why: str | None = None, remedy: str | None = None):
        self.what, self.where, self.why, self.remedy = what, where, why, remedy
        super().__init__(self.line())

    def line(self) -> str:
        """Format the error as the one line the user sees."""
        text = self.what if self.where is None else f"{self.what} ({self.where})"
        if self.why:
            text += f": {self.why}"
        if self.remedy:
            text = f"{text.rstrip('.')}. {self.remedy}"
        return text

    def __reduce__(self):  # errors cross process boundaries (loader workers, gathered verdicts)
        return _rebuild, (type(self), self.what, self.where, self.why, self.remedy)


def _rebuild(kind, what, where, why, remedy):
    return kind(what, where=where, why=why, remedy=remedy)


class UsageError(UserError):
    """Wrong use or wrong settings."""

    status = 2


class DataError(UserError):
    """Bad data."""

    status = 3


class MachineError(UserError):
    """The environment cannot do it (no GPU, a library is missing, no disk)."""

    status = 4


class StoppedError(UserError):
    """Stopped by a signal; the same command resumes."""

    status = 75


class RestartError(UserError):
    """Starting the ranks again from the last checkpoint may help: a peer is lost, one hangs, memory ran out.

    `litchi train --procs` does so when a rank ends with this status, which no user sees: where nobody does, it becomes
    that of a MachineError.
    """

    status = 76
