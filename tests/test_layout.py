"""The layout is law: who may import whom, what pure modules may touch, how long a file may grow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "coordinator", "esnode")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
STDLIB_PURE = {
    "__future__",
    "ast",
    "base64",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "difflib",
    "enum",
    "fnmatch",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "string",
    "struct",
    "tomllib",
    "types",
    "typing",
}
# Pure modules, and what each may import beyond pure stdlib modules and one another.
PURE: dict[str, set[str]] = {
    "protocol/bodies.py": set(),
    "protocol/chain.py": set(),
    "protocol/counting.py": set(),
    "protocol/entries.py": {"msgspec", "nacl"},
    "protocol/envelope.py": set(),
    "protocol/errors.py": set(),
    "protocol/fields.py": set(),
    "protocol/forks.py": set(),
    "protocol/growing.py": set(),
    "protocol/invite.py": set(),
    "protocol/lock.py": set(),
    "protocol/messages.py": {"msgspec"},
    "protocol/pieces.py": set(),
    "protocol/peers.py": {"msgspec"},
    "protocol/plan.py": set(),
    "protocol/plan_fields.py": set(),
    "protocol/ranges.py": {"msgspec"},
    "protocol/seeds.py": set(),
    "protocol/shaping.py": set(),
    "protocol/terms.py": {"nacl"},
    "protocol/wire.py": {"msgpack", "msgspec"},
    "protocol/zmtp.py": set(),
    "coordinator/answers.py": {"msgspec"},
    "coordinator/enrolment.py": {"msgspec"},
    "coordinator/audit.py": {"msgspec"},
    "coordinator/auditing.py": {"msgspec"},
    "coordinator/cases.py": {"msgspec"},
    "coordinator/cells.py": {"msgspec"},
    "coordinator/claims.py": {"msgspec"},
    "coordinator/disputes.py": {"msgspec"},
    "coordinator/amend.py": {"msgspec"},
    "coordinator/events.py": {"msgspec"},
    "coordinator/holders.py": set(),
    "coordinator/leases.py": {"msgspec"},
    "coordinator/limits.py": set(),
    "coordinator/machine.py": {"msgspec"},
    "coordinator/lineage.py": {"msgspec"},
    "coordinator/membership.py": {"msgspec"},
    "coordinator/metrics.py": set(),
    "coordinator/donors.py": {"msgspec"},
    "coordinator/peers.py": {"msgspec"},
    "coordinator/picture.py": {"msgspec"},
    "coordinator/relayrules.py": set(),
    "coordinator/roster.py": {"msgspec"},
    "coordinator/rounds.py": {"msgspec"},
    "coordinator/standoff.py": set(),
    "coordinator/state.py": {"msgspec"},
    "coordinator/succession.py": {"msgspec"},
    "coordinator/terms.py": {"msgspec"},
    "coordinator/turn.py": {"msgspec"},
    "coordinator/work.py": {"msgspec"},
    "esnode/catchup.py": set(),
    "esnode/sources.py": set(),
    "esnode/snapshotevents.py": set(),
    "esnode/proofevents.py": set(),
    "esnode/laneerrands.py": set(),
    "esnode/laneevents.py": set(),
    "esnode/lanes.py": set(),
    "esnode/laneshare.py": set(),
    "esnode/lanestate.py": set(),
    "esnode/transfer.py": set(),
    "esnode/transferevents.py": set(),
    "esnode/branches.py": set(),
    "esnode/events.py": set(),
    "esnode/evidence.py": set(),
    "esnode/inbox.py": set(),
    "esnode/node.py": set(),
    "esnode/nodestate.py": {"msgspec"},
    "esnode/pausing.py": set(),
    "esnode/policy.py": set(),
    "esnode/proof.py": set(),
}
BANNED_NAMES = ("util", "manager", "common", "helper", "base", "misc")
BANNED_CALLS = {"eval", "exec", "open", "input", "print", "hash", "id", "__import__"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_import_law(path: Path) -> None:
    """protocol imports nothing of ours; coordinator and esnode never import each other."""
    package = path.relative_to(ROOT).parts[0]
    others = {"protocol": {"coordinator", "esnode"}, "coordinator": {"esnode"}, "esnode": {"coordinator"}}
    roots = {module.split(".")[0] for module in imports(path)}
    assert not roots & others[package]
    assert "tests" not in roots


@pytest.mark.parametrize("path", [ROOT / file for file in PURE], ids=name)
def test_pure_modules_touch_nothing(path: Path) -> None:
    """No clock, randomness, file, socket, thread or environment inside a pure module."""
    pure_modules = {file.removesuffix(".py").replace("/", ".") for file in PURE}
    for module in imports(path):
        assert (
            module in STDLIB_PURE
            or module in pure_modules | {"coordinator", "esnode"}
            or module.split(".")[0] in PURE[name(path)]
        ), module
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS, f"{name(path)}:{node.lineno} calls {node.func.id}"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_files_stay_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "a module says what lives there"
    assert not any(word in path.stem for word in BANNED_NAMES)


def said_callers(path: Path) -> list[Path]:
    """The files that a docstring says are its callers: those named after "Called by" in that sentence."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    sentence = re.split(r"; |\.(?: |$)|, which| through ", text.partition("Called by ")[2])[0]
    home = path.relative_to(ROOT).parts[0]
    return [
        next(found for found in (ROOT / word, ROOT / home / word, path.parent / word) if found.exists())
        for word in re.findall(r"`([\w/]+\.py)`", sentence)
    ]


@pytest.mark.parametrize("path", [path for path in MODULES if said_callers(path)], ids=name)
def test_who_is_said_to_call_a_module_does(path: Path) -> None:
    """By importing it or its package, or by its name in a string: loaders, and processes of ours."""
    module = name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, stem = module.rpartition(".")
    for caller in said_callers(path):
        tree = ast.parse(caller.read_text())
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        known = imports(caller) | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        known |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert module in known or (package in known and stem == "interface"), name(caller)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_functions_stay_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, f"{name(path)}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_evaluation_and_no_pickle(path: Path) -> None:
    """L8: nothing a model, a peer or a checkpoint says is ever executed."""
    assert not imports(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "eval", f"{name(path)}:{node.lineno}"


def test_base_install_needs_no_torch() -> None:
    """The coordinator's modules import nothing that the base install lacks."""
    third_party = {"msgpack", "msgspec", "nacl", "zmq", "numpy", "click", "rich"}
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] == "esnode":
            continue
        for module in imports(path):
            root = module.split(".")[0]
            known = root in sys.stdlib_module_names or root in PACKAGES or root in third_party
            assert known, f"{name(path)}: {root}"


def test_every_module_finds_what_it_imports() -> None:
    """In one fresh process; only vLLM may be missing where it cannot be installed."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert error.name == 'vllm', f'{name}: {error}'\n"
    )
    command = [sys.executable, "-c", program, *(part.removesuffix(".__init__") for part in names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
