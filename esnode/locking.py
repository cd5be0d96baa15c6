"""From a plan to the lock that all replicas agree on, and from a lock back to ready prompts and scorer.

`resolve` does it once, where the run is started; every step is told. `prepare` and `scorer` do it on every
node, and refuse in one sentence what would silently make a node's rewards differ: other data, other scorer
code, other package versions, other token ids. Called by `begin.py`, `planfile.py`, `fork.py`, `evaluate.py`,
`bench.py` and `workshop.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from esnode import manifest, models, prompts, tasks
from esnode.models import ModelFolder
from esnode.prompts import SPLITS, Prepared
from esnode.scoring import Scorer
from esnode.tasks import Task
from esnode.tell import Tell, silent, step
from protocol.errors import UserError
from protocol.lock import Lock, Parent, TensorSpec, resolve_slice
from protocol.plan import Plan


class LockingError(UserError):
    """A plan that cannot become a lock here: the sentence names what is missing."""


class Mismatch(UserError):
    """This node would measure something else than the run's other nodes; the sentence says what differs."""


def resolve(
    plan: Plan,
    *,
    trusted: Sequence[str],
    parent: Parent | None = None,
    progress: Tell = silent,
    code: Path | None = None,
    digests: bool = True,
) -> tuple[Lock, bytes, ModelFolder]:
    """The lock of a plan, the task's data blob and the model's folder.

    `trusted` are the signing keys (hex) when the plan names none; `parent` is the state a fork starts from,
    whose digest becomes the lock's; `code` the folder that `python:` tasks may be loaded from. Without
    `digests` the weights are not hashed and the lock cannot be that of a run. Raises what resolving the
    model, the task and the prompts raises, LockingError, LockError.
    """
    model = models.resolve(plan.model, lambda message: progress(message, 0, 1))
    with step(progress, f"making the data of task {plan.task}"):
        data = tasks.materialise(plan.task, plan.task_options, code=code)
        _, options = tasks.header(data)
        task = tasks.open_task(plan.task, options, data, code=code)
    max_new_tokens = plan.max_new_tokens or task.max_new_tokens
    with step(progress, "tokenising the prompts"):
        prepared = prompts.prepare(model.path, task, plan.date, max_new_tokens)
        per_round, chunk = resolve_slice(plan.per_round, plan.chunk, len(task.train))
    if digests:
        base, digest, specs = _weights(plan, model, parent, progress)
    else:
        base, digest, specs = "00" * 32, 0, manifest.read(model.path, plan.include, plan.exclude)
    lock = Lock(
        model=model.label,
        base=base,
        digest=digest,
        manifest=tuple(specs),
        parent=parent,
        task=plan.task,
        task_options=options,
        data=hashlib.sha256(data).hexdigest(),
        scorer=tasks.scorer_digest(plan.task, code),
        packages=versions(task),
        date=plan.date,
        train_prompts=len(task.train),
        heldout_prompts=len(task.heldout),
        train_tokens=prepared.digest("train"),
        heldout_tokens=prepared.digest("heldout"),
        stop_ids=prepared.stop_ids,
        reward_low=task.low,
        reward_high=task.high,
        per_round=per_round,
        chunk=chunk,
        max_new_tokens=max_new_tokens,
        trusted=plan.trusted or tuple(trusted),
        **{name: getattr(plan, name) for name in _AS_PLANNED},
    )
    return lock, data, model


_AS_PLANNED = (
    "members", "mirrored", "sigma", "alpha", "shaping", "clip", "std_floor", "update", "include", "exclude",
    "live_dtype", "master", "repeatable", "temperature", "top_p", "seed",
)  # fmt: skip


def _weights(
    plan: Plan, model: ModelFolder, parent: Parent | None, progress: Tell
) -> tuple[str, int, list[TensorSpec]]:
    """Base digest, D of the state the run starts from, and the manifest."""
    with step(progress, "hashing the base model"):
        specs = manifest.read(model.path, plan.include, plan.exclude)
        base = manifest.base_digest(model.path, specs)
    if parent is not None:
        return base, parent.digest, specs
    from esnode import kernels  # loads torch; forks do without

    with step(progress, "taking the digest of the start"):
        return base, manifest.state_digest(model.path, specs, kernels.pick("cpu"), plan.master), specs


def versions(task: Task) -> dict[str, str]:
    """Installed versions of the packages that the scores depend on; LockingError names a missing one."""
    found = {}
    for package in task.packages:
        version = _installed(package)
        if version is None:
            raise LockingError(
                f"task {task.name!r} is scored with {package}, which is not installed: pip install {package}"
            )
        found[package] = version
    return found


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- on a node


def fits(lock: Lock, data: bytes) -> bool:
    """Whether these are the task's data that the run was locked with."""
    return hashlib.sha256(data).hexdigest() == lock.data


def own_data(lock: Lock, folder: Path, *, code: Path | None = None) -> bytes:
    """The data of the run's own task: `task.jsonl` in `folder`, else made again from what the plan named.

    TaskError when the code of a `python:` task is missing, Mismatch when there are no such data.
    """
    task, argument = tasks.find(lock.task)
    task.locate(argument, code)
    kept = folder / "task.jsonl"
    if kept.is_file() and fits(lock, data := kept.read_bytes()):
        return data
    try:
        data = tasks.materialise(lock.task, lock.task_options, code=code)
        if fits(lock, data):
            return data
        why = "made again they are others"
    except tasks.TaskError as error:
        why = str(error)
    raise Mismatch(
        f"the data that the run measured on are not here ({why}): put the run's task.jsonl beside its "
        f"ledger, or name what to measure on with --task {lock.task}"
    )


def prepare(lock: Lock, folder: Path, data: bytes, *, code: Path | None = None) -> Prepared:
    """The lock's task as token ids of the model in `folder`, all compared with the lock. Raises Mismatch."""
    if not fits(lock, data):
        raise Mismatch(
            f"the data of task {lock.task!r} is not the run's: copy task.jsonl from its run folder"
        )
    task = tasks.open_task(lock.task, lock.task_options, data, code=code)
    if tasks.scorer_digest(lock.task, code) != lock.scorer:
        raise Mismatch(
            f"this esnode scores task {lock.task!r} with other code than the run was locked with: install "
            "the same version of esnode"
        )
    for package, version in lock.packages.items():
        here = _installed(package)
        if here != version:
            raise Mismatch(
                f"the run is scored with {package} {version}, this node has {here or 'none'}: "
                f"pip install '{package}=={version}'"
            )
    prepared = prompts.prepare(folder, task, lock.date, lock.max_new_tokens)
    check(lock, prepared)
    return prepared


def check(lock: Lock, prepared: Prepared) -> None:
    """Raise Mismatch unless the token ids are those that the lock pins."""
    for split, pinned in zip(SPLITS, (lock.train_tokens, lock.heldout_tokens), strict=True):
        if prepared.digest(split) != pinned:
            here = ", ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "tokenizers"))
            raise Mismatch(
                f"the {split} prompts give other token ids here than in the run: the tokenizer files or "
                f"their library differ (here {here}). Use the run's model folder and versions."
            )


def scorer(lock: Lock, data: bytes, *, code: Path | None = None) -> Scorer | None:
    """The scoring process of the lock's task, not started; None where none is needed. Close it when done."""
    made = Scorer(lock.task, lock.task_options, data, code=code)
    return made if made.task.mode == "generate" else None
