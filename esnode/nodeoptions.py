"""What a node process is told: its command line, and what lies in the run's folder for it.

Called by `daemon.py`; `workshop.py` builds the engine from the same options.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from esnode import joined
from esnode.engines.wish import DEFAULT, MASTERS, Wish
from protocol import keys, zmtp
from protocol.errors import UserError
from protocol.lock import Lock, LockError, lock_from_bytes

if TYPE_CHECKING:
    from esnode.enginethread import Workshop

    Loader = Callable[["Options", Lock], Workshop]

FIRST_CONTACT_SECONDS = 60.0  # how long a coordinator may take to appear
ENGINES = ("transformers", "vllm")
DEFAULT_LOADER = "esnode.workshop:load"


class WrongModel(UserError):
    """The base model here is not the run's."""


class FolderMissing(UserError):
    """The run's folder lacks what a node needs from it."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    run: Path
    name: str
    threads: int
    engine: str = "transformers"  # or "vllm"
    backend: str | None = None
    model: str | None = None  # folder, GGUF file or hub id; None: the plan's, or found by the lock's label
    code: Path | None = None  # the folder a `python:` task may load its code from
    coordinator: tuple[str, ...] = ()  # addresses; empty: the run folder's own coordinator
    plain: bool = False
    loader: str = DEFAULT_LOADER
    wait: float = FIRST_CONTACT_SECONDS
    peer_port: int | None = None  # of the peer socket, 0: any; None: only a joined machine has one
    peer_mbit: float = 0.0  # what donating may take; 0: the policy's limit
    catch_up: str = "auto"  # or "replay", "snapshot"
    wish: Wish = DEFAULT  # where the master lies
    lanes: tuple[str, ...] = ()  # engines in processes of their own (`devices.py`); none: one, in ours
    planned: Callable[[int, int], None] | None = None  # told what a lane will take: of host memory, in all

    @property
    def folder(self) -> Path:
        """The node's own folder."""
        return self.run / "nodes" / self.name


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; exits with code 2 and a usage line when it makes no sense."""
    parser = argparse.ArgumentParser(prog="esnode.daemon", description="Work for a run.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--name", required=True, help="this node's name; its files are in RUN/nodes/NAME")
    parser.add_argument("--threads", type=int, default=0, help="threads of the engine; 0 = all cores")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="what decodes")
    parser.add_argument("--backend", help="kernel implementation: cpu, triton, compiled or reference")
    parser.add_argument("--model", help="folder, GGUF file or hub id of the base model; default: the plan's")
    parser.add_argument("--code", type=Path, help="folder a python: task may load its code from")
    parser.add_argument("--coordinator", action="append", default=[], metavar="tcp://HOST:PORT")
    parser.add_argument("--plain", action="store_true", help="no encryption: tests on loopback only")
    parser.add_argument("--loader", default=DEFAULT_LOADER, help="MODULE:FUNCTION that builds the engine")
    parser.add_argument(
        "--wait", type=float, default=FIRST_CONTACT_SECONDS, help="seconds for the first contact"
    )
    parser.add_argument("--peer-port", type=int, help="port that serves snapshots to other nodes; 0: any")
    parser.add_argument("--peer-mbit", type=float, default=0.0, help="limit of serving; 0: the policy's")
    parser.add_argument("--catch-up", choices=("auto", "replay", "snapshot"), default="auto")
    parser.add_argument("--tp", type=int, default=0, help="ranks of the vLLM engine; 0: as few as fit")
    parser.add_argument("--sharing", type=int, default=1, help="engines that the GPU is shared by")
    parser.add_argument("--rows", type=int, default=0, help="prompts at once at most; 0: any number")
    parser.add_argument("--master", choices=MASTERS, default=MASTERS[0], help="where the master lies")
    parser.add_argument(
        "--lane", action="append", default=[], dest="lanes", metavar="DEVICE", help="an engine of its own"
    )
    found = vars(parser.parse_args(arguments))
    if not found["name"] or "/" in found["name"] or found["name"].startswith("."):
        parser.error(f"--name {found['name']!r} is no file name")
    numbers = {name: found.pop(name) for name in ("sharing", "tp", "rows")}
    wish = Wish(found.pop("master"), **numbers)
    found["threads"] = found["threads"] or cores()
    for several in ("coordinator", "lanes"):
        found[several] = tuple(found[several])
    return Options(**found, wish=wish)


def lane_words(
    options: Options, threads: int, backend: str | None, sharing: int = 1, ranks: int = 0, rows: int = 0
) -> list[str]:
    """The command line of one lane of this node: what concerns the engine. `sharing`: lanes on its GPU;
    `ranks`: of its engine, 0 for as many as it takes; `rows`: prompts at once at most, 0 for any number.
    """
    said = {
        "run": options.run,
        "name": options.name,
        "threads": threads,
        "engine": options.engine,
        "backend": backend or options.backend,
        "model": options.model,
        "code": options.code,
        "loader": options.loader,
        "master": options.wish.master,
        "tp": ranks or None,
        "sharing": sharing if sharing > 1 else None,
        "rows": rows or None,
    }
    return [word for name, value in said.items() if value is not None for word in (f"--{name}", str(value))]


def loader(spec: str) -> Loader:
    """The function that builds the engine, by its name MODULE:FUNCTION."""
    module, _, function = spec.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def check_base(found: int, lock: Lock) -> None:
    """D of the base model that was loaded must be the run's."""
    if found != lock.digest:
        raise WrongModel(
            f"the base model here has digest {found:016x}, the run's is {lock.digest:016x}; "
            "it is another model, or a file of it is damaged"
        )


def cores() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def read_lock(run: Path) -> Lock:
    """The run's lock."""
    path = run / "lock.json"
    try:
        return lock_from_bytes(path.read_bytes())
    except OSError as error:
        raise FolderMissing(f"cannot read {path}: {error.strerror}; --run names the run's folder") from error
    except LockError as error:
        remedy = "copy it again from the run's folder, or run `esnode join` again"
        raise FolderMissing(f"{path} is damaged ({error}): {remedy}") from error


def own_key(folder: Path) -> bytes:
    """The CURVE secret in a node's folder, made at first use."""
    try:
        return keys.new_curve_file(folder / "curve.key")
    except keys.KeyDamaged as error:
        raise FolderMissing(
            f"{error}. Put a copy of it back; without one, move it away and enrol anew: with a new invite "
            "(`esnode join INVITE`), or on the coordinator's machine with "
            f"`esnode coordinator serve --allow {folder.name}`"
        ) from error


def addresses(options: Options) -> tuple[str, ...]:
    """Where to look for the coordinator; empty while that is not known."""
    if options.coordinator:
        return options.coordinator
    note = joined.read(options.run)
    return note.addresses if note else published_address(options.run)


def published_address(run: Path) -> tuple[str, ...]:
    """Where the folder's own coordinator listens; empty while it does not."""
    try:
        found = run.joinpath("coordinator", "address").read_text().strip()
        zmtp.host_and_port(found)
    except (OSError, ValueError):  # damaged: the coordinator writes it anew when it starts
        return ()
    return (found,)


def no_coordinator(run: Path) -> str:
    """What a node says that does not know where its coordinator is."""
    if (run / "coordinator" / "curve.pub").exists() and not (run / "plan.toml").exists():
        return (
            f"{run / joined.FILE} is missing, which says where the coordinator is: `esnode join INVITE` with "
            "a new invite writes it again; keys and ledger beside it stay good"
        )
    return f"no coordinator has started on {run}; start it, or name --coordinator"


def key_file(run: Path) -> Path:
    """Where the coordinator's public key lies in a run's folder."""
    return run / "coordinator" / "curve.pub"


def pinned_key(run: Path) -> bytes:
    """The coordinator's public key, the only one this node will talk to."""
    path = key_file(run)
    try:
        return keys.parse_public(path.read_text(errors="replace"), str(path))
    except OSError as error:
        raise FolderMissing(
            f"cannot read the coordinator's public key {path}; start the coordinator first"
        ) from error
