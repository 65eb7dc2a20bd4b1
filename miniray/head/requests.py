"""What drivers, workers and daemons can ask of the head, by the name of the request.

Responsible for taking requests apart and answering them; each is done by the part
that owns what it is about.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from miniray.core import plain
from miniray.exceptions import MinirayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray._proto import common_pb2
    from miniray.head.head import Head

logger = logging.getLogger(__name__)


class Requests:
    """Handlers by name. Each is called with the asking process and the request's arguments."""

    def __init__(self, head: Head) -> None:
        self._clients = head.clients
        actors, leases, groups, kv, state = (
            head.actors,
            head.leases,
            head.placement_groups,
            head.kv,
            head.state,
        )
        self._handlers: dict[str, Callable[..., Any]] = {
            "create_actor": actors.create,
            "start_actor": lambda _, *args: actors.start(*args),
            "subscribe_actor": actors.subscribe,
            "kill_actor": lambda _, *args: actors.kill(*args),
            "actor_out_of_scope": actors.out_of_scope,
            "get_actor": lambda _, *args: actors.find(*args),
            "list_named_actors": lambda _, *args: actors.named(*args),
            "want_leases": leases.want,
            "return_lease": leases.give_back,
            "swap_lease": leases.swap,
            "hold_leases": leases.hold,
            "awaits_calls": lambda _, *args: head.departures.began(*args),
            "ended_jobs": head.tell_ended_jobs,
            "waits_for": lambda _, *args: head.departures.waits_for(*args),
            "create_placement_group": lambda _, *args: groups.create(*args),
            "remove_placement_group": lambda _, *args: groups.remove(*args),
            "placement_group_table": lambda _, *args: groups.table(*args),
            "find_placement_group": lambda _, *args: groups.find(*args),
            "pin_placement_group": lambda _, *args: groups.pin(*args),
            "put_code": lambda _, *args: head.code.put(*args),
            "use_code": lambda _, *args: head.code.use(*args),
            "get_code": lambda _, *args: head.code.get(*args),
            "kv_put": lambda _, *args: kv.put(*args),
            "kv_get": lambda _, *args: kv.get(*args),
            "kv_del": lambda _, *args: kv.delete(*args),
            "kv_keys": lambda _, *args: kv.keys(*args),
            "kv_exists": lambda _, *args: kv.exists(*args),
            "drain_node": lambda _, prefix: head.drains.drain(prefix),
            "undo_drain": lambda _, prefix: head.drains.undo(prefix),
            "nodes": lambda _: state.ray_nodes(),
            "cluster_resources": lambda _: state.total_resources(),
            "available_resources": lambda _: state.available_resources(),
            "state": lambda _, what: state.listing(what),
            "status": lambda _: state.status(),
            "waiting_of_job": state.waiting_of_job,
            "why_waits": state.why_waits,
        }
        #: What becomes of those who wait for what a refused notice was to bring about.
        self._failing: dict[str, Callable[..., None]] = {
            "want_leases": leases.refuse,
            "create_actor": actors.refuse,
            "start_actor": actors.refuse,
            "create_placement_group": groups.refuse,
        }
        #: Handlers that answer by themselves, with the request's number.
        self._later: dict[str, Callable[..., None]] = {
            "await_placement_group": groups.wait,
            "await_drained": head.drains.wait,
            "await_end": head.ends.wait,
        }

    def handle(self, request: common_pb2.ClientRequest) -> None:
        """Do what is asked; errors go to who asked."""
        who, number, method = request.process_id, request.request, request.method
        arguments: tuple[Any, ...] = ()
        try:
            arguments = tuple(plain.loads(request.body))
            later = self._later.get(method)
            if later is not None:
                later((who, number), *arguments)
                return
            result = self._handler(method)(who, *arguments)
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
        if fail is not None and arguments:
            why = f"the head refused it ({type(error).__name__}: {error})"
            fail(who, why, *arguments)
