"""`esnode run --resume` on a toy folder, no model: `python -m tests.toy_run DIR NODES [LOADER]`

Only the end of the run (which needs a model to export) is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from esnode import finish, run
from esnode.begin import Request
from esnode.cli.main import fail
from protocol.errors import UserError


def main() -> int:
    """Run the folder to its END entry; the exit code of `esnode run`."""
    finish.finish = lambda *_: None  # type: ignore[assignment]
    finish.show = lambda outcome, console: console.print("finished")  # type: ignore[assignment]
    folder, nodes, *loader = sys.argv[1:]
    words = ("--loader", *(loader or ["tests.toy_engine:load"]))
    try:
        request = Request(out=Path(folder), resume=True, nodes=int(nodes), node_words=words)
        return run.run(request, Console(width=200))
    except UserError as error:
        fail(str(error), error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
