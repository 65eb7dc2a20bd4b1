"""What the tests of submitted jobs share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cluster_helpers import wait_until

if TYPE_CHECKING:
    from command_helpers import CommandLine

FINAL = ("STOPPED", "SUCCEEDED", "FAILED")


def submit(command: CommandLine, *arguments: str) -> str:
    """Submit a job and return its id at once."""
    done = command.run("job", "submit", "--no-wait", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def details(command: CommandLine, name: str) -> dict[str, Any]:
    """What is known of a job."""
    done = command.run("job", "status", name, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wait_for(command: CommandLine, name: str, *states: str) -> dict[str, Any]:
    """Return what is known of a job once it has one of these states."""
    found: list[dict[str, Any]] = []

    def has() -> bool:
        found[:] = [details(command, name)]
        return found[0]["status"] in states

    wait_until(has, 40, told=lambda: found)
    return found[0]


def log_of(command: CommandLine, name: str) -> str:
    """What a job has printed."""
    done = command.run("job", "logs", name)
    assert done.returncode == 0, done.stderr
    return done.stdout
