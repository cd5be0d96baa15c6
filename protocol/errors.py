"""The one kind of error a user is meant to read: modules derive their own, the command line prints it."""

from __future__ import annotations


class UserError(Exception):
    """What happened, why, and what to do about it, in one or two lines. Shown without a traceback."""

    exit_code = 1
