"""A run's folder: its paths, who may use it now, and files that a power cut leaves whole.

Called by whatever reads or writes one. Knows nothing of models.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UserError
from protocol.ledger import sync_path
from protocol.lock import Lock, LockError, lock_from_bytes

MIN_FREE = 16 * 1024 * 1024  # bytes; less than this cannot hold journal, ledger and logs of a short run
STALE_WAIT = 8.0  # seconds that the children of a killed run get to notice and let go of the lock


class FolderError(UserError):
    """The folder cannot be used for this; the sentence says which folder to choose or what to run instead."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Creating the object touches nothing."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.toml"

    @property
    def lock(self) -> Path:
        return self.path / "lock.json"

    @property
    def task(self) -> Path:
        return self.path / "task.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "run.ledger"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def units(self) -> Path:
        return self.path / "units.jsonl"

    @property
    def picture(self) -> Path:
        return self.path / "reward.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def answers(self) -> Path:
        """Held-out answers before and after, made at the end."""
        return self.path / "answers.json"

    @property
    def coordinator(self) -> Path:
        return self.path / "coordinator"

    @property
    def parents(self) -> Path:
        return self.path / "parents"

    @property
    def busy(self) -> Path:
        return self.path / ".busy"

    def node(self, name: str) -> Path:
        return self.path / "nodes" / name

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.plan.is_file()


def create(path: Path) -> RunFolder:
    """Make the folder of a new run, or take an empty one. FolderError when it holds anything already."""
    folder = RunFolder(path)
    if folder.is_run:
        raise FolderError(
            f"{path} already holds a run. Continue it with `esnode run --resume --out {path}`, "
            "or choose another folder with --out."
        )
    if folder.lock.exists():
        raise FolderError(without_plan(folder))
    first_files = {".busy", "plan.toml.new"}  # all that a run killed in its first moment leaves behind
    if path.is_dir() and any(entry.name not in first_files for entry in path.iterdir()):
        raise FolderError(f"{path} exists and is no run folder. Choose a new or empty folder with --out.")
    if path.exists() and not path.is_dir():
        raise FolderError(f"{path} is a file. Choose a new or empty folder with --out.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, NotADirectoryError) as error:  # a file, or /proc, in the middle of the path
        raise FolderError(f"{path} cannot be created ({error.strerror}). Choose another folder.") from error
    return folder


def open_run(path: Path, served: bool = False) -> RunFolder:
    """The folder of an existing run. FolderError when there is none; `served`: it takes a coordinator."""
    folder = RunFolder(path)
    start = f"`esnode coordinator serve PLAN --data {path}`" if served else f"`esnode run --out {path}`"
    if not path.is_dir():
        raise FolderError(f"there is no folder {path}. Start a run with {start}.")
    if not folder.is_run and folder.lock.exists():
        raise FolderError(without_plan(folder))
    if not folder.is_run:
        raise FolderError(f"{path} holds no run (no plan.toml). Start one with {start}.")
    return folder


def lock_of(folder: RunFolder) -> Lock:
    """The folder's lock. FolderError, with the remedy, when the file is damaged."""
    try:
        return lock_from_bytes(folder.lock.read_bytes())
    except LockError as error:
        remedy = "put a copy of it back, for example a node's"
        if folder.ledger.exists():
            remedy = "remove that one file: the next start makes it again from the ledger"
        raise FolderError(f"{folder.lock} is damaged ({error}): {remedy}") from error


def without_plan(folder: RunFolder) -> str:
    """What to do about a run whose plan file is gone: of a locked plan only `[ops]` is read any more."""
    lock = lock_of(folder)
    words = f"--task '{lock.task}' --model '{lock.model}'"
    return (
        f"{folder.plan} is missing; the run itself is still in {folder.lock.name}. Put a copy of the plan "
        f"back, or write one and set the rounds under [ops]: esnode plan new {words} > {folder.plan}"
    )


def occupy(folder: RunFolder, flag: str = "--out") -> int:
    """Take the folder for this process and those it starts; returns the descriptor that holds it.

    `flag` is the option that names another folder, for the sentence that refuses.

    Two locks on one file. The record lock is this process's alone: held means another `esnode run` lives.
    The flock goes with the descriptor, which the children inherit, so it is free only when the last of them
    is gone: a resumed run never meets the processes of a killed one.
    """
    descriptor = os.open(folder.busy, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise FolderError(
            f"{folder.path} is in use by process {holder}. Wait for it, stop it with Ctrl-C, "
            f"or choose another folder with {flag}."
        ) from None
    deadline = time.monotonic() + STALE_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise FolderError(
                    f"processes of an earlier run still use {folder.path}. End them (`fuser {folder.busy}` "
                    "names them) and try again."
                ) from None
            time.sleep(0.1)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def busy(folder: RunFolder) -> bool:
    """Whether a run is using the folder right now."""
    try:
        descriptor = os.open(folder.busy, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def require_space(folder: RunFolder, needed: int = MIN_FREE) -> None:
    """FolderError when the folder's disk has less than `needed` bytes left."""
    stats = os.statvfs(folder.path)
    free = stats.f_bavail * stats.f_frsize
    if free < needed:
        raise FolderError(
            f"the disk of {folder.path} is full: {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB needed. "
            "Free some space or choose a folder on another disk."
        )


def write_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `content`, flushed to disk: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        draft.unlink(missing_ok=True)  # on a full disk a half-written draft would only take more space
        raise
    os.replace(draft, path)
    sync_path(path.parent)
