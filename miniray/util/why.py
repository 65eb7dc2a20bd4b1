"""Why something waits: the chain from it to what it waits for in the end, and cycles in it.

Made of the answers of processes and head at one moment; nothing is recorded in advance. A chain
goes from a wait to the object, the call that makes it, the queue of an actor, what runs there, and
what that waits for.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

from miniray.common.names import short_name
from miniray.common.object_ref import PROCESS_ID_LENGTH, owner_of, short_id
from miniray.common.state_types import MAX_OBJECTS
from miniray.profiling.targets import actors_called, is_called
from miniray.util.task_records import NOTHING, ask_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from miniray.profiling.targets import ClusterSource, ProcessTold

#: Seconds that processes have to answer.
_PATIENCE = 2.0
#: Links of a chain, things that are looked at for it, and holders that are named, at most.
_LONGEST, _MOST, _NAMED = 100, 10_000, 5


class NothingWaitsError(ValueError):
    """The subject is unknown, or does not wait."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One link of a chain."""

    #: wait, ref, task, actor or resources.
    kind: str
    #: Names it among those of its kind: equal ones make a cycle.
    id: bytes
    name: str
    #: What it does or waits for.
    text: str
    #: Returns what it waits for.
    after: Callable[[], Iterable[Link]] = tuple
    stack: list[str] = dataclasses.field(default_factory=list)
    #: It goes on with any one of several things that follow it: no cycle through it is a deadlock.
    needs_one: bool = False

    @property
    def key(self) -> tuple[str, bytes]:
        """What names it among all."""
        return self.kind, self.id


def why(source: ClusterSource, of: str = "") -> dict[str, Any]:
    """Return why something waits.

    Args:
        source: The cluster.
        of: The id of an object or a call (or its first digits, or as ``miniray`` shows it, short);
            the id, name or class of an actor; the name of a task. Empty: all that drivers wait for.

    Returns:
        ``{"chain": [{"kind", "name", "text", "stack"}], "deadlock": bool, "notes": [sentence]}``.

    Raises:
        NothingWaitsError: The subject is unknown, or nothing waits.
    """
    view = _View(source)
    chain: list[Link] = []
    for start in view.starts(of):
        found, cycle = _walk(start)
        if cycle >= 0:
            return _answer(found, cycle, view)
        if len(found) > len(chain):
            chain = found
    if not chain:
        raise NothingWaitsError(view.unknown(of))
    return _answer(chain, -1, view)


def _answer(chain: list[Link], cycle: int, view: _View) -> dict[str, Any]:
    told: list[dict[str, Any]] = [
        {name: getattr(link, name) for name in ("kind", "name", "text", "stack")}
        for link in chain[:_LONGEST]
    ]
    if cycle >= 0:
        names = [link.name for link in chain[cycle:] if link.kind in ("task", "actor")]
        text = ", which waits for ".join([*names, names[0]]) if names else "a cycle"
        told.append({"kind": "deadlock", "name": "deadlock", "text": text, "stack": []})
    return {"chain": told, "deadlock": cycle >= 0, "notes": view.notes}


def _walk(start: Link) -> tuple[list[Link], int]:
    """Follow what each thing waits for.

    Returns:
        The chain that ends in a cycle, with the place where that begins, if there is one; else the
        first chain, and -1.
    """
    first: list[Link] = []
    path = {start.key: start}
    nexts = [iter(start.after())]
    done: set[tuple[str, bytes]] = set()
    while path and len(done) < _MOST:
        link = next(nexts[-1], None)
        if link is None:
            first = first or list(path.values())
            nexts.pop()
            done.add(path.popitem()[0])
        elif link.key in path:
            chain, begin = list(path.values()), list(path).index(link.key)
            if not any(each.needs_one for each in chain[begin:]):
                return chain, begin
        elif link.key not in done:
            path[link.key] = link
            nexts.append(iter(link.after()))
    return first or list(path.values()), -1


class _View:
    """A cluster at one moment."""

    def __init__(self, source: ClusterSource) -> None:
        self._source = source
        self.processes, silent = ask_processes(source, _PATIENCE, MAX_OBJECTS, threads=True)
        self.notes = [f"What {who} does is not known: {reason}." for who, reason in silent.items()]
        self._actors = {bytes.fromhex(each["actor_id"]): each for each in source.listing("actors")}
        self._pending = source.listing("pending")
        self._leases = source.listing("leases")
        self._by_id = {each.process: each for each in self.processes}
        self._actor_in = {
            bytes.fromhex(each["worker_id"]): bytes.fromhex(each["actor_id"])
            for each in source.listing("workers")
        }
        #: Calls by the ids of their results and by their own, each with its caller.
        self._calls: dict[bytes, tuple[ProcessTold, dict[str, Any]]] = {}
        #: By call: the process that has it, and for how many seconds it runs there (None: queued).
        self._works: dict[bytes, tuple[ProcessTold, float | None]] = {}
        #: By call: the threads and coroutines that run it.
        self._threads: dict[bytes, list[dict[str, Any]]] = {}
        for process in self.processes:
            self._enter(process)
        #: By actor: its process, if that has answered.
        self._process_of = {
            actor: self._by_id[id] for id, actor in self._actor_in.items() if id in self._by_id
        }

    def _enter(self, process: ProcessTold) -> None:
        told = process.told
        for call in told["calls"]:
            self._calls.update(dict.fromkeys((call["task_id"], *call["makes"]), (process, call)))
        for id, _, seconds in told["works"]:
            self._works[id] = (process, seconds)
        for thread in told["threads"]:
            if thread["task_id"]:
                self._threads.setdefault(thread["task_id"], []).append(thread)

    # --- where to begin --------------------------------------------------------------
    def starts(self, of: str) -> Iterator[Link]:
        """Yield what is meant."""
        if not of:
            for process in self.processes:
                for thread in process.told["threads"]:
                    if process.role == "driver" and thread["waits_for"]:
                        yield self._wait(process, thread)
            return
        for actor in actors_called(self._source, of):
            yield self._actor(bytes.fromhex(actor["actor_id"]))
        for id, (_, call) in list(self._calls.items()):
            if id == call["task_id"] and of in (call["name"], short_name(call["name"])):
                yield self._call(id)
            elif is_called(of, id.hex()):
                yield self._ref(id)

    def unknown(self, of: str) -> str:
        """Return a sentence for when no wait matches."""
        if not of:
            return "No driver waits for a value. Give an id or a name to ask about that."
        return (
            f"Nothing that is called {of!r} waits or runs: give the id of an object or a task, the "
            "id, name or class of an actor, or the name of a task. `miniray list tasks` shows what "
            "has not ended."
        )

    # --- links -------------------------------------------------------------------------
    def _refs(self, ids: Iterable[bytes]) -> Iterator[Link]:
        return map(self._ref, ids)

    def _wait(self, process: ProcessTold, thread: dict[str, Any]) -> Link:
        ids = thread["waits_for"]
        text = f"{thread['thread']} waits for {len(ids)} value{'s' if len(ids) > 1 else ''}"
        id = process.process + str(thread["thread"]).encode()
        name, after = self._process(process), functools.partial(self._refs, ids)
        return Link("wait", id, name, text, after, thread["stack"])

    def _ref(self, id: bytes) -> Link:
        name = f"ObjectRef({short_id(id.hex())})"
        if id in self._calls:
            _, call = self._calls[id]
            text = f"has no value yet: {self._name_of(call)} is to make it"
            return Link("ref", id, name, text, lambda: [self._call(id)])
        if owner_of(id) in self._by_id:
            return Link("ref", id, name, "has a value, or no call makes it any more")
        text = f"belongs to process {owner_of(id).hex()}, which reports no call that makes it"
        return Link("ref", id, name, text)

    def _call(self, id: bytes) -> Link:
        caller, call = self._calls[id]
        id = call["task_id"]
        link = functools.partial(Link, "task", id, self._name_of(call))
        if id in self._works:
            process, seconds = self._works[id]
            if seconds is None:
                return self._queued(link, process, id)
            threads = self._threads.get(id, ())
            return link(
                f"runs for {seconds:.1f} s in {self._process(process)}",
                lambda: self._refs(ref for each in threads for ref in each["waits_for"]),
                [line for each in threads for line in each["stack"]],
                needs_one=any(each["needed"] < len(each["waits_for"]) for each in threads),
            )
        is_on_its_way = False
        if call["state"] == "PENDING_ARGS_AVAIL":
            text = f"waits for {len(call['needs'])} of its arguments"
        elif call["state"] == "PENDING_NODE_ASSIGNMENT":
            text = "is not sent yet"
        else:
            where = self._by_id.get(call["process"])
            what = self._process(where) if where is not None else f"node {call['node'].hex()[:8]}"
            text = f"was sent to {what}, which has not taken or has just answered it"
            is_on_its_way = True  # in a moment it runs or is queued: it waits for nothing yet
        after = functools.partial(self._after_call, caller, call)
        text = f"{text} (called by {self._process(caller)})"
        return link(text, after, needs_one=is_on_its_way)

    def _queued(self, link: Callable[..., Link], process: ProcessTold, id: bytes) -> Link:
        queued = [each for each, _, seconds in process.told["works"] if seconds is None]
        before = queued.index(id)
        calls = "1 call" if before == 1 else f"{before} calls"
        text = f"waits for its turn in {self._process(process)}, with {calls} before it"
        several = len(process.told["works"]) - len(queued) > 1
        return link(text, lambda: self._running_in(process), needs_one=several)

    def _name_of(self, call: dict[str, Any]) -> str:
        """Name a call and its actor."""
        actor = self._actors.get(call["actor_id"])
        name = short_name(call["name"])
        if actor is None:
            return name
        return f"{name} of {actor['name'] or short_id(actor['actor_id'])}"

    def _actor(self, id: bytes) -> Link:
        actor = self._actors[id]
        name = f"{short_name(actor['class_name'])} {actor['name'] or short_id(id.hex())}"
        link = functools.partial(Link, "actor", id, name)
        if actor["state"] == "DEAD":
            return link(actor["death_cause"])
        seconds = time.time() - actor["since"]
        stack: list[str] = []
        if actor["state"] == "STARTING":
            stack = [line for each in self._threads.get(id, ()) for line in each["stack"]]
            text = f"is STARTING for {seconds:.1f} s: its constructor runs"
        elif not actor.get("started", True):
            text = "waits for the arguments of its constructor"
        elif actor["why_waits"]:
            text = f"waits for resources for {seconds:.1f} s: {actor['why_waits']}"
        else:
            process = self._process_of.get(id)
            told = process.told if process is not None else NOTHING
            running = sum(seconds is not None for *_, seconds in told["works"])
            queued = len(told["works"]) - running
            text = f"is {actor['state']} (pid {actor['pid']}): of its calls {running} "
            text += f"run{'s' * (running == 1)}, {queued} wait{'s' * (queued == 1)} for a turn"
        return link(text, lambda: self._after_actor(id), stack)

    # --- what follows ------------------------------------------------------------------
    def _after_call(self, caller: ProcessTold, call: dict[str, Any]) -> Iterator[Link]:
        """Yield what a call waits for that no process has taken."""
        if call["needs"]:
            yield from self._refs(call["needs"])
        elif call["type"] == "ACTOR_TASK":
            yield from self._before(caller, call)
            if call["actor_id"] in self._actors:
                yield self._actor(call["actor_id"])
        elif call["type"] == "ACTOR_CREATION_TASK":
            id = _other_of(call["task_id"])
            if id in self._actors:
                yield self._actor(id)
        elif call["state"] == "PENDING_NODE_ASSIGNMENT":
            yield from self._resources(caller, call)

    def _running_in(self, process: ProcessTold) -> Iterator[Link]:
        for id, _, seconds in process.told["works"]:
            if seconds is not None and id in self._calls:
                yield self._call(id)

    def _before(self, caller: ProcessTold, call: dict[str, Any]) -> Iterator[Link]:
        """Yield the calls of the same caller that this one has to follow, and that still wait."""
        for other in caller.told["calls"]:
            if other["task_id"] == call["task_id"]:
                return
            if other["actor_id"] == call["actor_id"] and other["needs"]:
                yield self._call(other["task_id"])

    def _after_actor(self, id: bytes) -> Iterator[Link]:
        actor = self._actors[id]
        for thread in self._threads.get(id, ()):  # of its constructor
            yield from self._refs(thread["waits_for"])
        if _other_of(id) in self._calls:
            _, creation = self._calls[_other_of(id)]
            yield from self._refs(creation["needs"])
        if actor["why_waits"]:
            demand = next((d for d in self._pending if d["reason"] == actor["why_waits"]), None)
            holders = self._holders(demand) if demand is not None else ""
            if holders:
                yield Link("resources", id, "resources:", holders)
        if (process := self._process_of.get(id)) is not None:
            yield from self._running_in(process)

    def _resources(self, caller: ProcessTold, call: dict[str, Any]) -> Iterator[Link]:
        names, job = (call["name"], short_name(call["name"])), caller.job.hex()
        of_kind = [each for each in self._pending if each["kind"] == "task"]
        demand = next(
            (d for d in of_kind if set(names) & set(d["names"]) and job in d["job_ids"]),
            next((d for d in of_kind if job in d["job_ids"]), None),
        )
        if demand is None:
            return
        text = f"{demand['reason']}. {self._holders(demand)}".rstrip()
        yield Link("resources", call["name"].encode(), "resources:", text)

    def _holders(self, demand: dict[str, Any]) -> str:
        """Return a sentence on the holders of what is missing; empty if there are none."""
        if not demand["resource"] or demand["infeasible"]:
            return ""  # the end of no holder could help
        resource, node = demand["resource"], demand["node_id"]
        holders = [
            (f"{short_name(each['class_name'])} (pid {each['pid']})", each)
            for each in self._actors.values()
            if each["state"] != "DEAD"
        ]
        holders += [(f"the task {short_name(each['name'])}", each) for each in self._leases]
        found = [
            f"{name} has {each['resources'][resource]:g}"
            for name, each in holders
            if each["resources"].get(resource) and node in ("", each["node_id"])
        ]
        if not found:
            return ""
        where = f" of node {node[:8]}" if node else ""
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"Of the {resource}{where} {', '.join(found[:_NAMED])}{more}."

    def _process(self, process: ProcessTold) -> str:
        actor = self._actors.get(self._actor_in.get(process.process, b""))
        what = "driver" if process.role == "driver" else "a worker"
        name = short_name(actor["class_name"]) if actor is not None else what
        return f"{name} (pid {process.pid}, node {process.node.hex()[:8]})"


def _other_of(id: bytes) -> bytes:
    """Return the id of the actor that the call of an id creates, or of that call (``call_id``)."""
    at = PROCESS_ID_LENGTH
    return id[:at] + bytes([id[at] ^ 0x80]) + id[at + 1 :]
