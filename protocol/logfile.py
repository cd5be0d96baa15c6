"""How both processes log: every line with time and level in one file, short lines on stderr; and how they put
what the system refused.

Lives here because coordinator and node do it alike. A parent that collects stderr in that very file gets each
line once. Names and reasons come from elsewhere: characters that could drive a terminal are replaced, further
lines of a text moved in.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.counting import of_note

PACKAGES = ("esnode", "coordinator", "protocol")


def printable(text: str) -> str:
    """The text without what could drive a terminal; line breaks stay."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def one_line(text: str) -> str:
    """Foreign words as a part of one of our lines: no line breaks either."""
    return printable(" ".join(text.split()))


def indented(text: str) -> str:
    """The text with every further line moved in: at the left margin only our own lines begin."""
    return "\n    ".join(printable(text).splitlines())


def sentence(topic: str, fields: Mapping[str, Any]) -> str:
    """A note of a core as a line: "membership: gpu-1 left (paused by its owner)".

    Who and what come first, the reason last; of the rest what is a word or a number is told by its name.
    """
    rest = [_named(topic, name, fields[name]) for name in fields if name not in ("node", "what", "reason")]
    rest = [words for words in rest if not words.endswith(" ")]
    said = " ".join(_word(fields[name]) for name in ("node", "what") if name in fields)
    line = ", ".join(filter(None, (said, *rest)))
    reason = _word(fields.get("reason", ""))
    if not reason or not line:
        return f"{topic}: {line or reason}"
    return f"{topic}: {line} ({reason})"


def _named(topic: str, name: str, value: object) -> str:
    return of_note(topic, value) if name == "round" and isinstance(value, int) else f"{name} {_word(value)}"


def _word(value: object) -> str:
    """A value in a log line; nothing for what is neither a word nor a number."""
    if isinstance(value, bytes):
        return value.hex()[:16]
    return f"{value:.6g}" if isinstance(value, float) else str(value) if isinstance(value, str | int) else ""


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))


def start(path: Path, name: str) -> logging.Logger:
    """The logger `name`, writing to `path` (folders made) and to stderr. Call once per process."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG if os.environ.get("ESNODE_DEBUG") else logging.INFO)
    logger.propagate = False
    logging.raiseExceptions = False  # a line lost to a full disk is no news: what matters stops the process
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = []
    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(_Printable("%(asctime)s %(levelname)-7s %(message)s"))
    handlers.append(to_file)
    if not _same_file(path):
        to_terminal = logging.StreamHandler(sys.stderr)
        to_terminal.setFormatter(_Printable(f"{name}: %(message)s"))
        handlers.append(to_terminal)
    for place in {logger, *map(logging.getLogger, PACKAGES)}:  # what modules warn of belongs there too
        place.handlers[:] = handlers
    return logger


def last_words(log: logging.Logger | None, sentence: str) -> None:
    """The one line a user reads when a process refuses to go on; the log file keeps it too."""
    print(f"esnode: {indented(sentence)}", file=sys.stderr, flush=True)  # noqa: T201
    for handler in log.handlers if log else ():
        if isinstance(handler, logging.FileHandler) and not _same_file(Path(handler.baseFilename)):
            handler.handle(logging.LogRecord("", logging.ERROR, "", 0, sentence, None, None))


def remedy(number: int | None) -> str:
    """What to do when the system refused something with this error number, and why it may have."""
    if number in (errno.EMFILE, errno.ENFILE):
        return "this process may open too few files: raise the limit (ulimit -n, 256 or more) and start again"
    return "mend the disk or the folder and start again"


def why_not_bound(address: str, number: int | None) -> str:
    """Why an address cannot be listened on, by the system's error number."""
    if number == errno.EADDRINUSE:
        return f"{address} is in use by another program; choose another port, or port 0 for any free one"
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{address} is no address of this machine; use 127.0.0.1, 0.0.0.0 or one of its own"
    if number == errno.EACCES:
        return f"no permission to listen on {address}; choose a port above 1023"
    return f"cannot listen on {address}: {os.strerror(number or 0)}"


def _same_file(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), os.stat(path))
    except OSError:  # stderr is closed
        return False
