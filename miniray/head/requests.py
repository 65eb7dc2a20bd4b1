"""What drivers, workers and daemons can ask of the head, by the name of the request.

Responsible for taking requests apart and answering them; each is done by the part
that owns what it is about.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from miniray.exceptions import MinirayError
from miniray.messages import plain
from miniray.messages.validation import Arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray._proto import common_pb2
    from miniray.head.cluster import ClusterDirectories
    from miniray.head.state import ClusterState

    Handlers = dict[str, Callable[..., Any]]

logger = logging.getLogger(__name__)


class Requests:
    """Handlers by name. Arguments that do not match a handler's annotations are refused."""

    def __init__(self, cluster: ClusterDirectories, state: ClusterState) -> None:
        self._clients = cluster.clients
        by, later = _for_process(cluster, state), _to_answer_later(cluster)
        self._by, self._later = by.keys(), later.keys()
        self._handlers = {**by, **later, **_for_anybody(cluster, state)}
        self._arguments = {
            name: Arguments(handler, name in by or name in later)
            for name, handler in self._handlers.items()
        }
        self._failing = _on_refused_notice(cluster)
        self._failing_arguments = {name: Arguments(fail, 2) for name, fail in self._failing.items()}

    def handle(self, request: common_pb2.ClientRequest) -> None:
        """Answer a request; its sender gets the error if it fails."""
        who, number, method = request.process_id, request.request, request.method
        arguments: tuple[Any, ...] = ()
        try:
            arguments = tuple(plain.loads(request.body))
            handler = self._handler(method)
            arguments = self._arguments[method].check(arguments)
            if method in self._later:
                handler((who, number), *arguments)
                return
            result = handler(who, *arguments) if method in self._by else handler(*arguments)
            if number:
                self._clients.answer(who, number, result)
        except (ValueError, MinirayError) as error:
            self._refuse(request, arguments, error)
        except Exception as error:
            logger.exception("request %r of %s failed", method, who.hex())
            self._refuse(request, arguments, error)

    def _handler(self, method: str) -> Callable[..., Any]:
        handler = self._handlers.get(method)
        if handler is None:
            raise ValueError(
                f"The head has no request {method!r}; it has {sorted(self._handlers)}."
            )
        return handler

    def _refuse(
        self, request: common_pb2.ClientRequest, arguments: tuple[Any, ...], error: Exception
    ) -> None:
        who, method = request.process_id, request.method
        if request.request:
            self._clients.refuse(who, request.request, error)
            return
        logger.warning("notice %r of %s was refused: %s", method, who.hex(), error)
        fail = self._failing.get(method)
        if fail is None:
            return
        try:
            self._failing_arguments[method].check(arguments)
        except ValueError:
            return  # it does not even say for what somebody waits
        why = f"the head refused it ({type(error).__name__}: {error})"
        fail(who, why, *arguments)


def _for_process(cluster: ClusterDirectories, state: ClusterState) -> Handlers:
    """Return requests whose handlers get the asking process, then the arguments."""
    actors, leases = cluster.actors, cluster.leases
    return {
        "create_actor": actors.create,
        "subscribe_actor": actors.subscribe,
        "actor_out_of_scope": actors.out_of_scope,
        "want_leases": leases.want,
        "return_lease": leases.give_back,
        "swap_lease": cluster.revocations.swap,
        "hold_leases": leases.hold,
        "ended_jobs": cluster.tell_ended_jobs,
        "waiting_of_job": state.waiting_of_job,
        "why_waits": state.why_waits,
    }


def _for_anybody(cluster: ClusterDirectories, state: ClusterState) -> Handlers:
    """Return requests whose handlers get the arguments alone."""
    actors, groups, kv = cluster.actors, cluster.placement_groups, cluster.kv
    return {
        "start_actor": actors.start,
        "kill_actor": actors.kill,
        "get_actor": actors.find,
        "list_named_actors": actors.named,
        "create_placement_group": groups.create,
        "remove_placement_group": groups.remove,
        "placement_group_table": groups.table,
        "find_placement_group": groups.find,
        "pin_placement_group": groups.pin,
        "put_code": cluster.code.put,
        "use_code": cluster.code.use,
        "get_code": cluster.code.get,
        "kv_put": kv.put,
        "kv_get": kv.get,
        "kv_del": kv.delete,
        "kv_keys": kv.keys,
        "kv_exists": kv.exists,
        "drain_node": cluster.drains.drain,
        "undo_drain": cluster.drains.undo,
        "nodes": state.ray_nodes,
        "cluster_resources": state.total_resources,
        "available_resources": state.available_resources,
        "job_output": cluster.submissions.output,
        "stop_job": cluster.submissions.stop,
        "delete_job": cluster.submissions.delete,
        "job_info": state.submitted_job,
        "job_infos": state.submitted_jobs,
        "state": state.listing,
        "status": state.status,
    }


def _to_answer_later(cluster: ClusterDirectories) -> Handlers:
    """Return requests whose handlers answer themselves, and get (process, number) first."""
    return {
        "await_placement_group": cluster.placement_groups.wait,
        "await_drained": cluster.drains.wait,
        "await_end": cluster.ends.wait,
        "submit_job": cluster.submissions.submit,
        "read_job_log": cluster.submissions.read_log,
    }


def _on_refused_notice(cluster: ClusterDirectories) -> Handlers:
    """Return what fails those who wait for a refused notice; gets process, why and arguments."""
    return {
        "want_leases": cluster.leases.refuse,
        "create_actor": cluster.actors.refuse,
        "start_actor": cluster.actors.refuse,
        "create_placement_group": cluster.placement_groups.refuse,
    }
