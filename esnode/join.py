"""`esnode join`: from an invite to a folder in which a node can work.

Shell. In this order: the node's key and its enrolment, the lock (shown, held against the invite and against
the machine's policy before anything large is moved), the task's data, its code if it has any, the base
model. Every step leaves what it made, so the same command goes on where it stopped. Called by `cli/join.py`,
which then runs the daemon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from esnode import duty, enrol, fetch, joined, notebook, policy, room
from esnode.folder import RunFolder, require_space, write_file
from esnode.history import title_of
from esnode.policy import GB
from esnode.tell import Tell, silent
from protocol import invite as invites
from protocol.errors import UserError
from protocol.lock import Lock

Say = Callable[[str], None]
CODE = "code"  # folder of a joined run that holds the task's code


class JoinError(UserError):
    """This machine cannot work for the run; the sentence says what to change."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for."""

    invite: str | None = None  # its text; None: a run that was joined before
    run: str | None = None  # beginning of the run id, when there is no invite
    data: Path | None = None  # where joined runs lie
    name: str | None = None
    model: str | None = None
    task_code: Path | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A folder a node can work in, and what the daemon has to be told."""

    folder: Path
    name: str
    model: Path
    code: Path | None

    @property
    def words(self) -> list[str]:
        """Arguments of `esnode.daemon`."""
        words = ["--run", str(self.folder), "--name", self.name, "--model", str(self.model)]
        return words + (["--code", str(self.code)] if self.code else [])


def prepare(request: Request, say: Say, tell: Tell = silent) -> Ready:
    """Do everything that comes before the daemon. UserError in one sentence when it cannot be done.

    notebook.RunOver when this machine's own ledger says that the run has ended.
    """
    allowed = duty.read_policy()
    given = invites.decode(request.invite) if request.invite else None
    folder = joined.folder_of(given.run, request.data) if given else joined.find(request.run, request.data)
    name = enrol.name_in(folder, request.name)
    try:
        notebook.refuse_if_over(folder / "nodes" / name)
    except notebook.RunOver as over:
        raise (notebook.RunOver(f"{over}. {_again(folder)}") if given else over) from None
    with enrol.enter(folder, name, given) as contact:
        note = joined.read(folder)
        assert note is not None, "entering wrote it"
        lock = fetch.lock(contact, note.run, folder / "lock.json")
        for line in describe(lock):
            say(line)
        allowed.admit(lock, used=room.taken(folder.parent, but=folder))
        require_space(RunFolder(folder))
        code = _code(lock, folder, request.task_code)
        fetch.keep_lock(lock, folder / "lock.json")
        fetch.task(contact, lock, folder / "task.jsonl", allowed.pace(), tell)
    return Ready(folder, name, _model(request.model, lock, say), code)


def _again(folder: Path) -> str:
    """What to do about an invite to a run that this machine has seen the end of."""
    return (
        "The invite is to that very run: the same plan and the same signing key are one run, wherever it is "
        f"served. For a new one give the plan another `seed`; to train the same again move {folder} away"
    )


def describe(lock: Lock) -> list[str]:
    """The run in a few lines: what it is, and what it will cost this machine."""
    needs = policy.needs(lock)
    return [
        f"run {lock.run_id.hex()[: joined.SHORT]}: {title_of(lock)}, {lock.members} members per round",
        f"  model   {needs.parameters / 1e6:,.1f} million parameters, {_size(needs.download)} as stored",
        f"  memory  {_size(needs.memory)} for the weights, more while it answers",
        f"  disk    {_size(needs.disk)} for a checkpoint, up to three of them, besides the model",
    ]


def _size(size: int) -> str:
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / 1e6:.1f} MB"


# ---------------------------------------------------------------- code and model


def _code(lock: Lock, folder: Path, given: Path | None) -> Path | None:
    """The folder that holds the run's task code; None for a task that has none of its own.

    Only a file that the user names is taken, and only with the digest that the lock pins.
    """
    kind, _, name = lock.task.partition(":")
    if kind != "python":
        if given is not None:
            raise JoinError(f"task {lock.task!r} has no code of its own: leave out --task-code")
        return None
    pinned = str(lock.task_options.get("code", ""))
    place = folder / CODE
    kept = (place / name).resolve()
    if not kept.is_relative_to(place.resolve()):
        raise JoinError(f"the run's task {lock.task!r} names a file outside any folder: it cannot be joined")
    if given is not None:
        if not given.is_file():
            raise JoinError(f"--task-code {given} is no regular file")
        content = given.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != pinned:
            raise JoinError(
                f"{given} is not the code of this run: its SHA-256 is {found}, the run's {pinned}. Ask the "
                "run's owner for the file"
            )
        write_file(kept, content)
    elif not kept.is_file() or hashlib.sha256(kept.read_bytes()).hexdigest() != pinned:
        raise JoinError(
            f"the task runs code of its own, which never travels: get {Path(name).name} (SHA-256 {pinned}) "
            "from the run's owner, read it, and name it with --task-code FILE"
        )
    return place


def _model(named: str | None, lock: Lock, say: Say) -> Path:
    """The folder of the run's base model, its digest checked."""
    from esnode import manifest, models

    try:
        found = models.resolve(named or lock.model, say)
    except models.ModelError as error:
        if named:
            raise
        raise JoinError(
            f"the run's base model {lock.model!r} was not found here ({error}) Name it with --model"
        ) from error
    specs = manifest.check(found.path, lock)  # names and shapes first: that takes no time
    if manifest.base_digest(found.path, specs) != lock.base:
        raise manifest.WrongBase(
            f"{found.path} has the shape of {lock.model!r} but other values than the run's base model: name "
            "the right one with --model"
        )
    return found.path
