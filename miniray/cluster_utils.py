"""Clusters of several nodes on one machine, for tests and for trying things out.

Each node is a daemon of its own, with its own workers and shared memory: to miniray
they are different machines. All of them end with the process that started them.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import subprocess
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.engines import refuse_on_ray
from miniray.runtime_env.validate import check_env_vars
from miniray.system.boot_options import BootOptions
from miniray.system.launch import launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.common.runtime import Runtime
    from miniray.system.launch import StartedNode


#: More nodes than there are.
_ALL = 1_000_000


class Node:
    """One node of a `Cluster`."""

    def __init__(self, started: StartedNode) -> None:
        self._started = started
        #: Hex id of the node.
        self.node_id = started.result.node_id
        #: Pids by role: "boot" and "node" (the daemon), "template", and "head" for the first node.
        self.pids: Mapping[str, int] = started.result.pids
        self.session_dir = started.result.session_dir

    @property
    def unique_id(self) -> str:
        """The node's id, under Ray's name."""
        return self.node_id

    def is_alive(self) -> bool:
        """Return whether the daemon runs."""
        return self._started.process.poll() is None

    def stop(self, *, graceful: bool = True) -> None:
        """End the node: by SIGTERM, or at once by SIGKILL; waits for its end."""
        process = self._started.process
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM if graceful else signal.SIGKILL)
        try:
            process.wait(2 * config().stop_grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __repr__(self) -> str:
        return f"Node({self.node_id})"


class Cluster:
    """A head and any number of nodes on this machine.

    Args:
        initialize_head: Start the first node, with the head, now.
        connect: Attach this process to it, as ``init(address=cluster.address)`` does.
        head_node_args: Arguments of ``add_node`` for the first node.
        shutdown_at_exit: End the cluster when the interpreter exits.
    """

    def __init__(
        self,
        initialize_head: bool = False,
        connect: bool = False,
        head_node_args: Mapping[str, Any] | None = None,
        shutdown_at_exit: bool = True,
    ) -> None:
        if connect and not initialize_head:
            raise ValueError("connect=True needs initialize_head=True: there is nothing to join.")
        refuse_on_ray("cluster_utils")
        self.head_node: Node | None = None
        self.worker_nodes: list[Node] = []
        self._token = ""
        self._address = ""
        self._lock = threading.Lock()
        self._shutdown_at_exit = shutdown_at_exit
        if initialize_head:
            self.add_node(**(head_node_args or {}))
            if connect:
                self.connect()
        if shutdown_at_exit:
            atexit.register(self.shutdown)

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the head, for ``init(address=...)``."""
        if not self._address:
            raise RuntimeError("The cluster has no head yet: call add_node() first.")
        return self._address

    @property
    def token(self) -> str:
        """The text with which further nodes join the cluster."""
        return self._token

    def connect(self, namespace: str | None = None) -> None:
        """Attach this process as a driver."""
        from miniray.api import init

        init(address=self.address, namespace=namespace)

    def add_node(
        self,
        wait: bool = True,
        *,
        num_cpus: float | None = None,
        num_gpus: int | None = None,
        gpu_family: str | None = None,
        resources: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        object_store_memory: int | None = None,
        memory: int | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> Node:
        """Start a node; the first one has the head. The node is part of the cluster on return.

        Args:
            wait: Kept for Ray's signature; a node is always ready on return.
            num_cpus: CPUs that it offers; all of the machine's unless given.
            num_gpus: GPUs that it offers; those that are found unless given.
            gpu_family: Vendor of the GPUs: "nvidia", "amd" or "intel". Default: the first of
                these that is found; GPUs that are not there are NVIDIA's.
            resources: Further resources by name: amounts, accelerators such as ``{"TPU": 4}``
                included, or custom devices as ``init`` takes them.
            labels: Labels of the node.
            object_store_memory: Bytes of its object store.
            memory: Bytes that it offers as the resource ``memory``.
            env_vars: Variables of the node and its workers, beside those of this process: such
                as ``CUDA_VISIBLE_DEVICES``, or those that name a TPU host's slice.

        Raises:
            ValueError: A value is not allowed.
            TypeError: ``env_vars`` holds something else than text.
        """
        del wait
        check_env_vars(env_vars or {}, "env_vars")
        what = BootOptions(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            gpu_family=gpu_family,
            resources=dict(resources or {}),
            labels=dict(labels or {}),
            object_store_memory=object_store_memory,
            memory=memory,
            parent_pid=os.getpid(),
        )
        with self._lock:
            return self._start(what, env_vars)

    def _start(self, options: BootOptions, env_vars: Mapping[str, str] | None) -> Node:
        """Start a node: the head's, if there is none yet."""
        first = self.head_node is None
        if not first:
            options = dataclasses.replace(
                options, head=False, address=self._address, token=self._token
            )
        started = launch(options, env_vars)
        if started.result.warning:
            warnings.warn(started.result.warning, UserWarning, stacklevel=3)
        node = Node(started)
        if first:
            self.head_node = node
            self._address = started.result.address
            self._token = started.result.token
        else:
            self.worker_nodes.append(node)
            if (runtime := self._attached()) is not None:
                # The answer comes behind the head's word of the new node to this driver's node.
                runtime.head.head_call("nodes")
        return node

    def remove_node(self, node: Node, allow_graceful: bool = True) -> None:
        """End a node; by SIGKILL unless ``allow_graceful``."""
        node.stop(graceful=allow_graceful)
        if node is self.head_node:
            self.head_node = None
            self._address = ""
        elif node in self.worker_nodes:
            self.worker_nodes.remove(node)
        else:
            raise ValueError(f"{node!r} is not a node of this cluster.")

    def list_all_nodes(self) -> list[Node]:
        """Return the nodes that were added and not removed."""
        return [*([self.head_node] if self.head_node is not None else []), *self.worker_nodes]

    def wait_for_nodes(self, timeout: float = 30.0) -> None:
        """Wait until the head counts as many living nodes as there are here.

        This process need not be attached to the cluster.

        Raises:
            TimeoutError: it does not within ``timeout`` seconds.
        """
        from miniray.util.state import list_nodes

        deadline = time.monotonic() + timeout
        expected = {node.node_id for node in self.list_all_nodes()}
        while True:
            try:
                found = list_nodes(self.address, limit=_ALL)
            except ConnectionError:
                raise RuntimeError(f"The head at {self.address} has ended.") from None
            alive = {node.node_id for node in found if node.state != "DEAD"}
            if alive == expected:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"After {timeout} s the head lists {len(alive)} living nodes, "
                    f"not {len(expected)}."
                )
            time.sleep(0.02)

    def shutdown(self) -> None:
        """Detach this process if it is attached, and end all nodes."""
        from miniray.api import shutdown

        if self._attached() is not None:
            shutdown()
        for node in [*self.worker_nodes, *([self.head_node] if self.head_node else [])]:
            node.stop()
        self.worker_nodes.clear()
        self.head_node = None
        self._address = ""
        if self._shutdown_at_exit:
            atexit.unregister(self.shutdown)

    def _attached(self) -> Runtime | None:
        """Return this process's runtime, if it is attached to this cluster."""
        from miniray.common.runtime import runtime_or_none

        runtime = runtime_or_none()
        if runtime is None or runtime.context().gcs_address != self._address:
            return None
        return runtime

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
