"""deploy/: what a machine without a container engine or a running systemd can check of each file."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.terms import EXIT_YIELDED
from tests import commands

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNITS = ("esnode-coordinator", "esnode-node")
STRICT = {
    "DynamicUser": "yes", "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes",
    "PrivateTmp": "yes", "CapabilityBoundingSet": "", "RestrictNamespaces": "yes",
    "StateDirectoryMode": "0700", "UMask": "0077", "SystemCallFilter": "@system-service",
    "ProtectKernelTunables": "yes",
}  # fmt: skip
EXPOSED = 2.5  # of 10, by systemd's own count


# ---------------------------------------------------------------- systemd


def unit(name: str) -> dict[str, list[tuple[str, str]]]:
    """A unit file by section, keys in order and possibly several times."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in (DEPLOY / f"{name}.service").read_text().splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            key, separator, value = line.partition("=")
            assert separator, line
            current.append((key, value))
    return sections


def test_a_coordinator_that_yields_is_not_started_again() -> None:
    kept = dict(unit("esnode-coordinator")["Service"])["RestartPreventExitStatus"].split()
    assert str(EXIT_YIELDED) in kept


@pytest.mark.parametrize("name", UNITS)
def test_units_are_hardened_and_run_what_exists(name: str) -> None:
    sections = unit(name)
    assert set(sections) == {"Unit", "Service", "Install"}
    service = dict(sections["Service"])
    assert STRICT.items() <= service.items()
    assert service["KillMode"] == "mixed"  # else a stop would end the relay or a lane under its parent
    assert service["Restart"] == "on-failure" and int(service["TimeoutStopSec"]) > 10
    environment = dict(v.split("=", 1) for k, v in sections["Service"] if k == "Environment")
    for options in ([], *examples(name)):
        environment["ESNODE_OPTIONS"] = shlex.join(options)
        program, *words = shlex.split(expanded(service["ExecStart"], environment))
        assert program.endswith("/bin/esnode")
        commands.check(words)


def test_what_the_node_unit_keeps_and_hides() -> None:
    service = unit("esnode-node")["Service"]
    environment = dict(value.split("=", 1) for key, value in service if key == "Environment")
    # A dynamic user has no home: there numba compiles anew at each start, and Triton has no place at all.
    assert environment["HOME"].startswith("%C/") and ("CacheDirectory", environment["HOME"][3:]) in service
    # A command line shows to every user of the machine.
    assert ("LoadCredential", "invite:/etc/esnode/invite") in service
    words = shlex.split(dict(service)["ExecStart"])
    assert words[1:3] == ["join", "%d/invite"]
    assert not any(word.startswith("esnode1") for options in examples("esnode-node") for word in options)
    assert "MemoryDenyWriteExecute" not in dict(service)  # numba compiles
    assert ("DeviceAllow", "char-nvidia* rw") in service  # the driver's names for its devices have changed


def examples(name: str) -> Iterator[list[str]]:
    """What the comment at the top suggests for ESNODE_OPTIONS."""
    yield from map(
        shlex.split, re.findall(r"^#   ESNODE_OPTIONS=(.*)$", (DEPLOY / f"{name}.service").read_text(), re.M)
    )


def expanded(line: str, environment: dict[str, str]) -> str:
    line = line.replace("%d", "/run/credentials").replace("%S", "/var/lib").replace("%C", "/var/cache")
    return re.sub(r"\$\{?(\w+)\}?", lambda found: environment[found[1]], line)


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
def test_units_in_the_eyes_of_systemd(tmp_path: Path, name: str) -> None:
    text = (DEPLOY / f"{name}.service").read_text()
    path = tmp_path / f"{name}.service"
    path.write_text(text.replace("/opt/esnode/bin/esnode", sys.executable))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0 and path.name not in verified.stderr, verified.stderr
    words = ["systemd-analyze", "security", "--offline=true", str(path)]
    rated = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    level = re.search(r"exposure level for .*: ([\d.]+)", rated)
    if level:  # older ones cannot judge a file
        assert float(level[1]) <= EXPOSED, rated


# ---------------------------------------------------------------- container file


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Containerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Each stage's instructions, those it inherits first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for instruction, rest in instructions():
        if instruction == "FROM":
            image, separator, name = rest.partition(" AS ")
            assert separator, f"a stage without a name: {rest}"
            if image not in {"scratch", *found}:
                assert re.fullmatch(r"[a-z.]+/[a-z/]+:\d[\w.-]+", image), f"{image} is not pinned"
            found[name] = list(found.get(image, ()))
        found[name].append((instruction, rest))
    return found


def test_the_container_file_builds_two_images() -> None:
    known = stages()
    assert {"coordinator", "node"} <= known.keys()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, steps in known.items():
        for instruction, rest in steps:
            assert "latest" not in rest
            if instruction == "COPY" and not rest.startswith("--from="):
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists(), rest
            elif instruction == "COPY":
                assert rest.split()[0].removeprefix("--from=") in known
            elif instruction == "RUN":
                for extra in re.findall(r"\[(\w+)\]", rest):
                    assert extra in extras and name == "build-node"
            assert instruction != "HEALTHCHECK"  # podman drops it from an image, with a warning
    assert "torch" not in str(known["build-coordinator"])
    # pycosat has no wheel, Triton compiles at run time; the coordinator needs no compiler.
    assert {name for name, steps in known.items() if re.search(r"\bgcc\b", str(steps))} == {
        "compiler",
        "build-node",
        "node",
    }
    for name in ("coordinator", "node"):
        steps = dict(known[name])
        assert steps["USER"] == "esnode" and json.loads(steps["ENTRYPOINT"]) == ["esnode"]
        commands.check(json.loads(steps["CMD"]))


# ---------------------------------------------------------------- compose file


def compose() -> dict[str, Any]:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert isinstance(found, dict)
    return found


def spelled(text: str) -> str:
    """${NAME:-default} as it is when nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_compose_file_starts_one_coordinator_and_two_nodes() -> None:
    whole = compose()
    services = whole["services"]
    assert sorted(services) == ["coordinator", "invite", "node-1", "node-2"]
    for name, service in services.items():
        assert re.fullmatch(r"esnode-(coordinator|node):\d+\.\d+\.\d+", service["image"]), name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        if "build" in service:
            assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()
            assert service["build"]["target"] in stages()
        for mount in service["volumes"]:
            source = spelled(mount).split(":")[0]
            assert source.startswith(("./", "/")) or source in whole["volumes"]
        for other, how in service.get("depends_on", {}).items():
            assert other in services
            if how["condition"] == "service_healthy":
                program, *words = health(services[other])
                assert program == "esnode"
                commands.check(words)
        for words in command_lines(service):
            commands.check(words)


def test_the_images_user_can_write_into_fresh_volumes() -> None:
    """A new volume has the owner of the image's folder below it, or root's where there is none."""
    whole = compose()
    made = dict(stages()["common"])["RUN"].partition("install -d -o esnode ")[2].split()
    for service in whole["services"].values():
        for source, target, *_ in (spelled(mount).split(":") for mount in service["volumes"]):
            assert source not in whole["volumes"] or target in made


def test_every_port_that_the_coordinator_listens_on_is_published() -> None:
    service = compose()["services"]["coordinator"]
    words = service["command"]
    for option in ("--bind", "--relay"):
        port = words[words.index(option) + 1].rpartition(":")[2]
        assert f"{port}:{port}" in service["ports"]


def health(service: dict[str, Any]) -> list[str]:
    """The command that tells whether a service is healthy."""
    kind, *words = service["healthcheck"]["test"]
    assert kind == "CMD"
    return words


def command_lines(service: dict[str, Any]) -> Iterator[list[str]]:
    """The `esnode` calls of a service, words after the program."""
    words = [spelled(word) for word in service["command"]]
    if service.get("entrypoint") == ["sh", "-c"]:
        yield shlex.split(words[0].partition(" > ")[0])[1:]
    else:
        yield words
