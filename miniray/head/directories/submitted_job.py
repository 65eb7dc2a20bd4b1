"""One submitted job, in the state that survives the head."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import TYPE_CHECKING, Any

from miniray.head.scheduling.demands import Demand

if TYPE_CHECKING:
    from miniray.common.specs import CommandSpec

#: States, with Ray's names.
PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED = (
    "PENDING",
    "RUNNING",
    "STOPPED",
    "SUCCEEDED",
    "FAILED",
)
#: What a job without resources holds: it runs on the head's node, as in Ray.
_AT_THE_HEAD = {"node:__internal_head__": 0.0001}
#: How a command that is a text is run.
_SHELL = ["/bin/sh", "-c"]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class SubmittedJob:
    """A submitted job, in the state that survives the head."""

    #: What its packages are kept for.
    id: bytes
    spec: CommandSpec
    #: Seconds since the epoch.
    submitted: float
    state: str = PENDING
    #: Why it ended so, or what it waits for as it runs, as a sentence.
    message: str = ""
    #: Whether `stop` was requested, with how many seconds for the command to end.
    stop_grace: float | None = None
    #: Number of its request, or of its lease.
    lease: int = 0
    #: Hex id of the node of its lease; empty: it waits.
    node: str = ""
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    #: How often it ran again: after failures of its command, and after losses of its node.
    failures: int = 0
    losses: int = 0
    #: It is being ended because it has run for too long.
    expired: bool = False
    #: One of Ray's names for what failed, or empty.
    error_type: str = ""
    #: Where in the log the output of this lease begins.
    log_start: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def entrypoint(self) -> str:
        """The command as its user has written it."""
        command = list(self.spec.command)
        return command[-1] if command[:-1] == _SHELL else shlex.join(command)

    @property
    def runtime_env(self) -> str:
        """Its environment as JSON, without the values of secrets."""
        return json.dumps(_without_secrets(self.spec)) if self.spec.runtime_env else ""

    @property
    def is_over(self) -> bool:
        return self.state not in (PENDING, RUNNING)

    def waits_as(self, lease: int) -> None:
        """Record the number of its request; 0: it has lost its lease, and has to request one."""
        self.state, self.node, self.lease = PENDING, "", lease

    def command_ended(self, code: int | None) -> None:
        self.exit_code = code

    def may_run_again(self, *, lost: bool) -> bool:
        """Count a failure of its command, or a loss of its node, and return whether it runs again.

        A job that was stopped does not; for one that runs no more, the counts stay.
        """
        done = self.losses if lost else self.failures
        if self.stop_grace is not None or done >= self.spec.max_retries:
            return False
        if lost:
            self.losses += 1
        else:
            self.failures += 1
        return True

    def demand(self) -> Demand:
        """Return what its command needs; ValueError if that is malformed."""
        spec = self.spec
        resources = spec.resources or ({} if spec.label_selector else _AT_THE_HEAD)
        return Demand.of(dict(resources), label_selector=spec.label_selector, lasting=True)


def difference(known: CommandSpec, given: CommandSpec) -> str:
    """Describe how two submissions under one id differ."""
    different = [
        f"{name} is {_shown(given, name)!r}, and was {_shown(known, name)!r}"
        for name in type(given).__dataclass_fields__
        if getattr(known, name) != getattr(given, name)
    ]
    return (
        f"The id {given.name!r} is taken by another job ({'; '.join(different)}). Choose another "
        f"id, or leave it out."
    )


def _shown(spec: CommandSpec, name: str) -> Any:
    return _without_secrets(spec) if name == "runtime_env" else getattr(spec, name)


def _without_secrets(spec: CommandSpec) -> dict[str, Any]:
    environment: dict[str, Any] = json.loads(spec.runtime_env or "{}")
    variables = environment.get("env_vars", {})
    variables |= {name: "***" for name in spec.secrets if name in variables}
    return environment
