"""The one kind of error a user is meant to read: modules derive their own, the command line prints it."""

from __future__ import annotations

import errno


class UserError(Exception):
    """What happened, why, and what to do about it, in one or two lines. Shown without a traceback."""

    exit_code = 1


def remedy(number: int | None) -> str:
    """What to do when the system refused something with this error number, and why it may have."""
    if number in (errno.EMFILE, errno.ENFILE):
        return "this process may open too few files: raise the limit (ulimit -n, 256 or more) and start again"
    return "mend the disk or the folder and start again"
