"""Requests about submitted jobs: from the command line and from ``JobSubmissionClient``.

Responsible for what a job brings along, and for going on where a followed log was cut.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.ids import new_id
from miniray.common.specs import CommandSpec
from miniray.exceptions import NodeDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from miniray.client.attach import Attachment
    from miniray.client.command_connection import CommandConnection

#: Seconds between attempts to reach the cluster again.
_AGAIN_AFTER = 0.2
#: What a cluster that is out of reach raises.
_CUT = (ConnectionError, NodeDiedError, TimeoutError, FileNotFoundError)


class JobConnection:
    """A cluster that jobs are submitted to.

    Args:
        connect: Finds it, or reaches it again.

    Raises:
        ConnectionError: There is none.
    """

    def __init__(self, connect: Callable[[], CommandConnection]) -> None:
        self._connect = connect
        self._connection: CommandConnection | None = connect()

    def submit(
        self,
        command: Sequence[str],
        *,
        submission_id: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        resources: Mapping[str, float] | None = None,
        label_selector: Mapping[str, str] | None = None,
        max_retries: int = 0,
        max_time: float = 0.0,
    ) -> str:
        """Upload the files of an environment and submit a job; return the job's id.

        Args:
            command: The program and its arguments.
            submission_id: None: one is made. A job with this id that asks for the same is the same.
            runtime_env: Of the command, and of the drivers in it.
            metadata: Strings by name.
            resources: What the command holds while it runs, in units; none: it runs on the head's
                node.
            label_selector: Conditions on the labels of its node.
            max_retries: How often it runs again after an exit code that is not 0, and as often
                after its node was lost.
            max_time: Seconds that the command may run; 0: no limit.

        Raises:
            JobAlreadyExistsError: Another job has the id.
            TypeError, ValueError: Something cannot be used.
            RuntimeEnvSetupError: Files are too large or cannot be read.
        """
        job_id = new_id()
        with self._cluster().attached(job_id) as attachment:
            environment = ""
            if runtime_env:
                uploaded = attachment.runtime.uploads.upload(runtime_env)
                environment = json.dumps(uploaded, sort_keys=True)
            spec = CommandSpec(
                name=submission_id if submission_id is not None else f"job-{new_id().hex()}",
                command=[*command],
                metadata=dict(metadata or {}),
                runtime_env=environment,
                max_retries=max_retries,
                max_time=max_time,
                resources={name: units for name, units in (resources or {}).items() if units},
                label_selector=dict(label_selector) if label_selector else None,
            )
            name: str = attachment.link.head_request("submit_job", job_id, spec.to_wire())
            return name

    @property
    def address(self) -> str:
        """That of the cluster's head."""
        return self._cluster().address

    def ask(self, method: str, *args: Any) -> Any:
        """Ask the head about jobs."""
        return self._cluster().ask(method, *args)

    def log(self, name: str) -> Iterator[bytes]:
        """Yield what a job has printed up to now."""
        offset = 0
        with self._cluster().attached() as attachment:
            while True:
                data, offset, _ = attachment.link.head_request("read_job_log", name, offset, False)
                if not data:
                    return
                yield data

    def follow(self, name: str) -> Iterator[bytes]:
        """Yield what a job prints until it has ended: each byte once, whatever is cut meanwhile.

        Raises:
            ConnectionError: The cluster was out of reach for ``node_timeout`` seconds.
        """
        offset, over = 0, False
        cut_at: float | None = None
        while not over:
            try:
                with self._cluster().attached() as attachment:
                    while not over:
                        data, offset, over = _more(attachment, name, offset)
                        cut_at = None
                        if data:
                            yield data
            except _CUT as error:  # noqa: PERF203 - a cut is rare
                cut_at = cut_at or time.monotonic()
                if time.monotonic() - cut_at > config().node_timeout:
                    raise ConnectionError(
                        f"The log of job {name} was cut: the cluster has been out of reach for "
                        f"{config().node_timeout:g} s ({error})"
                    ) from error
                self.close()
                time.sleep(_AGAIN_AFTER)

    def _cluster(self) -> CommandConnection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def close(self) -> None:
        """Leave the cluster; what is asked next reaches it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


def _more(attachment: Attachment, name: str, offset: int) -> tuple[bytes, int, bool]:
    data, end, over = attachment.link.head_request("read_job_log", name, offset, True)
    return data, end, over
