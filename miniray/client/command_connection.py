"""Requests of commands, ``miniray.util.state`` and job clients to a cluster, without a driver.

A cluster that has a node on this machine is reached through that; any other one through a temporary
node, as ``init()`` of a driver outside of the cluster starts one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import marshal
import os
import queue
import shutil
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.client.attach import Attachment, Introduction
from miniray.client.cluster_choice import (
    LocalNode,
    cluster_to_look_at,
    node_of_cluster,
    running_here,
    start_node,
    wanted_address,
)
from miniray.common.config import config
from miniray.common.object_ref import new_id
from miniray.exceptions import NodeDiedError
from miniray.security.token import TOKEN_VARIABLE, take_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from miniray.common.specs import CommandSpec

#: Seconds for an answer of the head, which it has in memory.
_PATIENCE = 5.0
#: Seconds in which a head that was killed is usually back.
_RESTART = 3.0
#: Rows of a listing that wait for its watcher; of more, the latest stay.
_MOST_ROWS = 1000


class Page(NamedTuple):
    """How to reach a cluster's page."""

    #: Lets one browser in, within a minute.
    url: str
    #: What programs show instead.
    token: str


class CommandConnection:
    """A connection to a cluster for requests."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        #: The token of the cluster's head.
        self.address = node.address

    def status(self) -> Any:
        """Return the cluster's status: a ``ClusterStatus``."""
        return self.ask("status")

    def listing(self, what: str) -> list[dict[str, Any]]:
        """Return one of the head's listings: "actors", "node_states", ..."""
        listing: list[dict[str, Any]] = self.ask("state", what)
        return listing

    def watch(self, listing: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a listing, and then each row that is new or changed.

        Raises:
            ConnectionError: This machine's node has ended, as after its cluster.
            ValueError: There is no such listing, or too many processes watch this cluster.
        """
        pushed: queue.Queue[dict[str, Any] | ConnectionError] = queue.Queue()
        pushed.queue = collections.deque(maxlen=_MOST_ROWS)
        lost = ConnectionError(f"The cluster at {self.address} has ended, or its node here has.")

        def take(_listing: str, data: bytes) -> None:
            changed, _ = marshal.loads(data)
            for row in changed.values():
                pushed.put(row)

        with self.attached(on_lost=lambda: pushed.put(lost)) as attachment:
            link, topics = attachment.link, attachment.runtime.on_topic
            topics["rows"] = take
            # The new head has no record of the watcher.
            topics["head_back"] = lambda: link.head_notice("watch", [listing])
            link.head_request("watch", [listing])
            while isinstance(told := pushed.get(), dict):
                yield told
        raise told

    def drain(self, prefix: str, *, undo: bool) -> str:
        """Stop placing work on a node, or allow it again; returns the node's id.

        Raises:
            ValueError: not exactly one living node has an id that begins so.
        """
        node_id: str = self.ask("undo_drain" if undo else "drain_node", prefix)
        return node_id

    def wait_drained(self, node_id: str, seconds: float | None) -> bool:
        """Wait until a drained node is idle; False if it is not drained any more.

        Raises:
            TimeoutError: something still runs there after ``seconds``.
        """
        with self.attached() as attachment:
            return bool(attachment.link.head_request("await_drained", node_id, timeout=seconds))

    def ask_nodes(
        self, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any = None
    ) -> list[tuple[bytes, Any, str]]:
        """Ask nodes, and through them their processes, as ``NodeLink.ask_nodes`` does."""
        with self.attached() as attachment:
            told = attachment.link.ask_nodes(what, arguments, seconds, nodes)
        own = bytes.fromhex(self._node.node_id) if self._node.process is not None else b""
        return [each for each in told if each[0] != own]

    def page(self) -> Page:
        """Let the cluster listen for browsers; return the page's address with a new code.

        Raises:
            ValueError: The head is on another machine.
            OSError: The address to listen on is none of that machine.
        """
        with self.attached() as attachment:
            told, _ = attachment.link.node_request("open_page", (), _PATIENCE)
        scheme, address, code, token = told
        return Page(f"{scheme}://{address}/#k={code}", token)

    def ask(self, method: str, *args: Any) -> Any:
        """Ask the head.

        Raises:
            ConnectionError: The head is out of reach, or does not answer.
        """
        with self.attached() as attachment, contextlib.suppress(TimeoutError):
            link = attachment.link
            return link.head_request(method, *args, timeout=_PATIENCE)
        with self.attached():  # raises if the loss of the head was noticed by now
            raise ConnectionError(
                f"The head at {self.address} did not answer within {_PATIENCE:g} s: it hangs, "
                "or this machine cannot reach it."
            )

    @contextlib.contextmanager
    def attached(
        self, job_id: bytes | None = None, on_lost: Callable[[], object] | None = None
    ) -> Iterator[Attachment]:
        """Attach to the node for some questions.

        Args:
            job_id: Of the job for which packages are brought along; None: none are.
            on_lost: Called when the node is gone.

        Raises:
            ConnectionError: The node has lost the head for longer than one takes to start again.
        """
        process_id = new_id()
        attachment = Attachment(
            self._node.node_socket,
            self._node.key,
            Introduction(process_id, "command", job_id or process_id),
            timeout=config().start_timeout,
            on_shutdown=lambda attachment: attachment.close(),
            on_lost=on_lost,
        )
        try:
            attachment.open()
            lost = attachment.welcome["head_lost"]
            if lost is not None and lost > _RESTART:
                raise ConnectionError(
                    f"The head at {self.address} has been out of reach of this machine's node for "
                    f"{lost:.0f} s. The node tries to reach it for {config().head_grace:g} s, and "
                    "ends then."
                )
            yield attachment
        finally:
            attachment.runtime.shutdown()

    def close(self) -> None:
        """End the node that this connection started, if any, and remove its files."""
        if self._node.process is not None:
            self._node.end()
            shutil.rmtree(self._node.session_dir, ignore_errors=True)  # its logs


def connect_for_cli(address: str | None, argument: str, token: str | None) -> CommandConnection:
    """Connect to a cluster of this user on this machine, or to one elsewhere.

    Args:
        address: As ``wanted_address`` takes it.
        argument: Name of the option or argument for an address, for errors.
        token: Of a cluster elsewhere; None: that of the environment, if there is one.

    Raises:
        ConnectionError: There is no such cluster, or several, and none was named.
        ValueError: The address or the token is none.
        BootError, MinirayError, OSError: The cluster elsewhere can't be joined.
    """
    wanted = wanted_address(address)
    record = cluster_to_look_at(wanted, argument)
    if record is not None:
        return CommandConnection(node_of_cluster(record))
    if wanted is None:
        raise ConnectionError(
            "No cluster of yours is running on this machine. Start one with `miniray start "
            f"--head`; to look at one elsewhere, give {argument}, and its token in "
            f"{TOKEN_VARIABLE}."
        )
    token = token or take_token()
    if not token or wanted.startswith("unix:"):
        raise ConnectionError(
            f"No cluster at {wanted} of yours is running on this machine. {running_here()} To look "
            f"at one elsewhere, set {TOKEN_VARIABLE} to its token, which `miniray start --head` "
            "printed."
        )
    return CommandConnection(_node_elsewhere(wanted, token))


def _node_elsewhere(address: str, token: str) -> LocalNode:
    from miniray.system.boot_options import BootOptions

    return start_node(
        BootOptions(head=False, address=address, token=token, embedded=True, parent_pid=os.getpid())
    )


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

    def submit(self, spec: CommandSpec, runtime_env: Mapping[str, Any] | None) -> None:
        """Upload the files of an environment and submit a job.

        Args:
            spec: Of the job. A spec equal to that of a job with this name is the same job.
            runtime_env: Of the command, and of the drivers in it.

        Raises:
            JobAlreadyExistsError: Another job has the name.
            TypeError, ValueError: Something cannot be used.
            RuntimeEnvSetupError: Files are too large or cannot be read.
        """
        job_id = new_id()
        with self._cluster().attached(job_id) as attachment:
            environment = ""
            if runtime_env:
                uploaded = attachment.runtime.uploads.upload(runtime_env)
                environment = json.dumps(uploaded, sort_keys=True)
            for secret in spec.secrets:  # else the one that is meant would be shown
                if secret not in (runtime_env or {}).get("env_vars", {}):
                    raise ValueError(
                        f"secrets has {secret!r}, and env_vars of runtime_env has no variable of "
                        "that name."
                    )
            held = {name: units for name, units in spec.resources.items() if units}
            spec = dataclasses.replace(spec, runtime_env=environment, resources=held)
            attachment.link.head_request("submit_job", job_id, spec.to_wire())

    @property
    def address(self) -> str:
        return self._cluster().address

    def ask(self, method: str, *args: Any) -> Any:
        return self._cluster().ask(method, *args)

    def log(self, name: str, since: float | None = None) -> Iterator[bytes]:
        """Yield a job's output up to now; ``since``: of the last seconds only."""
        offset = self._offset(name, since)
        end = self._offset(name, 0.0)  # one that prints faster than it is read has no other
        with self._cluster().attached() as attachment:
            while offset < end:
                data, offset, _ = attachment.link.head_request("read_job_log", name, offset, False)
                if not data:
                    return  # its file was emptied
                yield data

    def _offset(self, name: str, since: float | None) -> int:
        return 0 if since is None else int(self.ask("job_log_offset", name, since))

    def follow(self, name: str, since: float | None = None) -> Iterator[bytes]:
        """Yield a job's output until the job ends: each byte once, even across reconnects.

        Args:
            name: Of the job.
            since: Begin with the output of the last seconds; None: with all.

        Raises:
            ConnectionError: The cluster was out of reach for ``node_timeout`` seconds.
        """
        offset, over = self._offset(name, since), False
        cut_at: float | None = None
        while not over:
            try:
                with self._cluster().attached() as attachment:
                    while not over:
                        request = attachment.link.head_request
                        data, offset, over = request("read_job_log", name, offset, True)
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
        """Leave the cluster; the next request connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
