"""Clusters of several nodes for a module's tests, or for one of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import miniray
from miniray.cluster_utils import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextlib.contextmanager
def running_cluster(
    head: Mapping[str, Any],
    *others: Mapping[str, Any],
    connect: bool = True,
    namespace: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """A cluster that ends with the block.

    Args:
        head: Arguments of ``add_node`` for the head's node.
        others: Those of the other nodes.
        connect: Whether this process is attached to it.
        namespace: Of this process, if it is.
        variables: Environment variables during the block, for all nodes that start in it.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables or {}).items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for node in others:
                cluster.add_node(**node)
            if connect:
                miniray.init(address=cluster.address, namespace=namespace)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            miniray.shutdown()
            cluster.shutdown()


@contextlib.contextmanager
def running_ray_cluster(folder: Path, head: Any, *others: Any) -> Iterator[Any]:
    """One of Ray with miniray on it, whose session files are in a folder.

    Args:
        folder: It exists.
        head: Arguments of Ray's ``add_node`` for the head's node.
        others: Those of the other nodes.
    """
    from ray.cluster_utils import Cluster as RayCluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        options = {"include_dashboard": False, **head}
        cluster = RayCluster(initialize_head=True, head_node_args=options)
        try:
            for node in others:
                cluster.add_node(**node)
            miniray.init(cluster.address, engine="ray")
            cluster.wait_for_nodes()
            yield cluster
        finally:
            miniray.shutdown()
            cluster.shutdown()
