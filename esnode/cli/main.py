"""The `esnode` command: its table of subcommands, and how errors become exit codes.

Subcommands are imported only when they are used, so that `esnode --help` answers at once and the base install
(without torch) can run everything that needs no model. Called by `entry.py`, the console script, and as
`python -m esnode.cli.main`.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

import click

import esnode
from esnode.cli.entry import EXIT_INTERRUPTED
from protocol.errors import UserError
from protocol.logfile import printable

NO_MEMORY = (
    "memory ran out. Free some, or lift this process's limit (ulimit -v), and run the same command again."
)
EXIT_BUG = 70
NODE_EXTRA = frozenset(
    {
        *("accelerate", "gguf", "jinja2", "llvmlite", "math_verify", "matplotlib", "numba", "reasoning_gym"),
        *("safetensors", "tokenizers", "torch", "transformers"),
    }
)
NODE_INSTALL = "`make setup` in esnode's folder, or there pip install '.[node]'"
TRAIN, LEDGER, HERE, MANY = "Train", "Use a ledger", "This machine", "Several machines"


@dataclass(frozen=True, slots=True)
class Verb:
    """Where one subcommand lives and the line `--help` shows for it."""

    module: str
    attribute: str
    section: str
    summary: str


VERBS: dict[str, Verb] = {
    "run": Verb("esnode.cli.run", "run", TRAIN, "Train a model on this machine, from start to report."),
    "status": Verb("esnode.cli.status", "status", TRAIN, "Show where a run stands."),
    "plan": Verb("esnode.cli.plan", "plan", TRAIN, "Write, check and resolve plan files."),
    "verify": Verb("esnode.cli.ledger", "verify", LEDGER, "Rebuild the weights, compare every digest."),
    "show": Verb("esnode.cli.ledger", "show", LEDGER, "List the rounds of a ledger."),
    "export": Verb("esnode.cli.ledger", "export", LEDGER, "Write any round as a Hugging Face folder."),
    "evaluate": Verb("esnode.cli.evaluate", "evaluate", LEDGER, "Score a model or a ledger on a task."),
    "fork": Verb("esnode.cli.ledger", "fork", LEDGER, "Start a new run from any round of another."),
    "bench": Verb("esnode.cli.bench", "bench", HERE, "Measure where a node's time goes."),
    "doctor": Verb("esnode.cli.doctor", "doctor", HERE, "Check hardware, versions and kernels."),
    "coordinator": Verb("esnode.cli.coordinator", "coordinator", MANY, "Serve a run to other machines."),
    "invite": Verb("esnode.cli.nodes", "invite", MANY, "Make an invite for one more machine."),
    "nodes": Verb("esnode.cli.nodes", "nodes", MANY, "Who may work: list, allow, revoke."),
    "join": Verb("esnode.cli.join", "join", MANY, "Work for a run, by an invite."),
    "pause": Verb("esnode.cli.join", "pause", MANY, "Let this machine's nodes rest."),
    "resume": Verb("esnode.cli.join", "resume", MANY, "Let them work again."),
    "policy": Verb("esnode.cli.join", "policy", MANY, "What this machine does for others."),
    "node": Verb("esnode.cli.node", "node", MANY, "Work for a run whose folder is here."),
}


class Verbs(click.Group):
    """A group that knows its subcommands by name and imports one only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        command = getattr(importlib.import_module(verb.module), verb.attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command {args[0]!r}{_nearest(args[0])}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(verb.section for verb in VERBS.values()):
            rows = [(name, verb.summary) for name, verb in VERBS.items() if verb.section == section]
            with formatter.section(section):
                formatter.write_dl(rows, col_max=14)


def _nearest(word: str) -> str:
    import difflib

    close = difflib.get_close_matches(word, VERBS, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(esnode.__version__, prog_name="esnode")
def cli() -> None:
    """Fine-tune a language model with evolution strategies: many slightly perturbed copies answer the same
    prompts, and the weights move towards those that were rewarded. The processes exchange nothing but seeds
    and rewards, and the ledger of a run (some hundred kilobytes) rebuilds the trained model to the same bits.

    \b
    First commands:
      esnode doctor                               is this machine ready?
      esnode run                                  train the demo model here, a few minutes
      esnode verify runs/NAME                     rebuild it from the ledger, compare digests
      esnode evaluate runs/NAME --round 0         its score on held-out prompts, at any round

    \b
    Your own model and task (countdown with 1.5 billion weights wants a GPU: `esnode bench node --plan`):
      esnode plan new --task countdown --model Qwen/Qwen2.5-1.5B-Instruct > plan.toml
      esnode run --plan plan.toml --nodes 2 --out runs/mine
      esnode run --resume --out runs/mine         after Ctrl-C, a crash or a power cut
      esnode export runs/mine --round 40 --to model-40

    `esnode COMMAND --help` explains each command with an example.
    """


PLACES = ("ESNODE_CACHE", "ESNODE_CONFIG", "ESNODE_DATA")


def explain(error: OSError, words: Sequence[str] = ()) -> str | None:
    """One sentence for what only the user can mend: the disk, permissions, or a place that is named in the
    `words` of the command or in the environment. None when it is something else, perhaps a bug of ours.
    """
    where = f" ({error.filename})" if error.filename else ""
    if error.errno == errno.ENOMEM:
        return NO_MEMORY
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}. Free some space and run the same command again."
    if error.errno == errno.EROFS:
        return f"the file system is read-only{where}. Choose another folder."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission to write or read{where}. Change its owner or mode, or choose another folder."
    if error.errno == errno.ENAMETOOLONG:
        return f"a name is too long for this file system{where}. Choose a shorter one."
    path = error.filename
    if not isinstance(path, str) or not _is_named(path, words):
        return None
    if error.errno == errno.ENOENT:
        return f"{path} is not there and cannot be made there. Name another place."
    if error.errno == errno.EISDIR:
        return f"{path} is a folder where a file is needed. Name another place."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{path} is a file, or lies below one, where a folder is needed. Name another place."
    return None


def _is_named(path: str, words: Sequence[str]) -> bool:
    """Whether a path is one of the words (`x`, `--out=x`, `file:x`), below one, or on the way to one.

    Those that name the command are none of them: `run` of `esnode run` is no folder.
    """
    given = _arguments(cli, words)
    parts = [part for word in given for part in (word, word.partition("=")[2], word.partition(":")[2])]
    named = [_absolute(part) for part in [*parts, *map(os.environ.get, PLACES)] if part]
    ours = [_absolute(path), _absolute(path.removesuffix(".new"))]  # of a file, its draft too
    return any(one.is_relative_to(place) or place.is_relative_to(one) for one in ours for place in named)


def _arguments(command: click.Command, words: Sequence[str]) -> Sequence[str]:
    """What is left of the words after those that name a subcommand of `command`."""
    if not isinstance(command, click.Group) or not words:
        return words
    found = command.get_command(click.Context(command), words[0])
    return words if found is None else _arguments(found, words[1:])


def _absolute(path: str) -> PurePath:
    return PurePath(os.path.abspath(path))


def _shortage(error: Exception) -> bool:
    """Whether memory ran out: less may be left for us than the system says is free (`ulimit -v`)."""
    if isinstance(error, MemoryError):
        return True
    if "torch" not in sys.modules:  # nothing of its could have failed
        return False
    from esnode.engines.shortage import is_shortage

    return is_shortage(error)


def fail(message: str, code: int = 1) -> NoReturn:
    """One line on stderr, and the end."""
    click.echo(f"esnode: {printable(message)}", err=True)
    sys.exit(code)


def keep_interrupts() -> None:
    """Raise a Ctrl-C again that hit inside a callback, where Python can only print and forget it."""
    usual = sys.unraisablehook
    main_thread = threading.main_thread().ident or 0
    inside = threading.Lock()

    def again() -> None:
        with inside:  # what is raised before the hook has returned is forgotten as well
            pass
        time.sleep(0.01)
        signal.pthread_kill(main_thread, signal.SIGINT)

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            with inside:
                threading.Thread(target=again, daemon=True).start()
        else:
            usual(unraisable)

    sys.unraisablehook = hook


def main(arguments: Sequence[str] | None = None, interrupt: Any = None) -> NoReturn:
    """Run one command and exit: 0 done, 1 refused or failed, 2 wrong usage, 70 a bug of ours, 130 Ctrl-C.

    `interrupt`: what is to handle SIGINT from now on; None leaves that as it is.
    """
    try:
        if interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)
        keep_interrupts()
        outcome = cli.main(args=arguments, prog_name="esnode", standalone_mode=False)
        sys.exit(outcome if isinstance(outcome, int) else 0)
    except UserError as error:
        fail(str(error), error.exit_code)
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # of click 8.2 on: a group without a command
            click.echo(error.format_message(), err=True)
            sys.exit(error.exit_code)
        hint = f"\nTry: {error.ctx.command_path} --help" if error.ctx else ""
        fail(error.format_message() + hint, error.exit_code)
    except click.ClickException as error:
        fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away (| head): nothing to say, nobody to say it to
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in NODE_EXTRA:
            fail(f"this command needs {error.name}, part of the node extra: {NODE_INSTALL}")
        traceback.print_exc()
        sys.exit(EXIT_BUG)
    except OSError as error:
        sentence = explain(error, sys.argv[1:] if arguments is None else arguments)
        if sentence:
            fail(sentence)
        traceback.print_exc()
        sys.exit(EXIT_BUG)
    except Exception as error:
        if _shortage(error):
            fail(NO_MEMORY)
        traceback.print_exc()  # a bug of ours: the trace is what a report needs
        sys.exit(EXIT_BUG)


if __name__ == "__main__":
    main()
