"""Placement groups: names, owners, waiters, and the table that users see.

Where bundles go is the scheduler's decision.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import owner_of, short_id
from miniray.exceptions import PlacementGroupRemovedError
from miniray.head.scheduling.bundles import GroupPlacement, GroupStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.head.directories.clients import ClientDirectory, ProcessExit
    from miniray.head.directories.grants import GrantTable
    from miniray.head.scheduling.reasons import Reason

#: Removed groups that are remembered.
_REMEMBERED = 1024
#: Nodes that the table of all groups examines to explain why groups wait.
_LOOKS = 1000
#: A handle can be quicker than the notice that its group exists; it waits this long, in seconds.
_EARLY_WAIT = 10.0

#: A request that waits: (process id, number of the request).
Waiter = tuple[bytes, int]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class PlacementGroupEntry:
    """A placement group, with its name and its waiters."""

    id: bytes
    name: str
    namespace: str
    detached: bool
    strategy: str
    #: As requested, amounts in units.
    bundles: list[dict[str, float]]
    selectors: list[dict[str, str]] | None
    #: None if the request itself was invalid.
    state: GroupPlacement | None = None
    #: Why it can never be there.
    error: Exception | None = None
    removed: bool = False
    waiters: list[Waiter] = dataclasses.field(default_factory=list)
    #: Seconds since the epoch.
    asked: float = dataclasses.field(default_factory=time.time)
    placed: float | None = None

    @property
    def status(self) -> str:
        if self.removed or self.state is None:
            return GroupStatus.REMOVED.value
        return self.state.status.value

    def table(self, waits: Reason | None = None) -> dict[str, Any]:
        """Return Ray's ``placement_group_table``; ``waits`` says why it is not placed."""
        placed = self.state.allocations if self.state is not None and not self.removed else {}
        created = self.status == GroupStatus.CREATED.value
        took = 1000 * ((self.placed or time.time()) - self.asked)
        return {
            "placement_group_id": self.id.hex(),
            "name": self.name,
            "bundles": {index: dict(bundle) for index, bundle in enumerate(self.bundles)},
            "bundles_to_node_id": {
                index: placed[index].node_id if index in placed else ""
                for index in range(len(self.bundles))
            },
            "strategy": self.strategy,
            "state": self.status,
            "stats": {
                "end_to_end_creation_latency_ms": took if created else 0.0,
                "scheduling_latency_ms": took if created else 0.0,
                "scheduling_attempt": 1,
                "highest_retry_delay_ms": 0.0,
                "scheduling_state": self._progress(waits),
            },
        }

    def _progress(self, waits: Reason | None) -> str:
        if self.status == GroupStatus.CREATED.value:
            return "FINISHED"
        if self.status == GroupStatus.REMOVED.value:
            return "REMOVED"
        if waits is None:
            return "QUEUED"
        return "INFEASIBLE" if waits.infeasible else "NO_RESOURCES"


@dataclasses.dataclass(eq=False, repr=False)
class PlacementGroups:
    """All groups by id and name. Implements ``grants.GroupRequester``."""

    grants: GrantTable
    clients: ClientDirectory
    on_change: Callable[[PlacementGroupEntry], None]

    def __post_init__(self) -> None:
        self._groups: dict[bytes, PlacementGroupEntry] = {}
        self._removed: collections.OrderedDict[bytes, PlacementGroupEntry] = (
            collections.OrderedDict()
        )
        self._names: dict[tuple[str, str], PlacementGroupEntry] = {}
        #: Groups that are removed when their creator ends, in order.
        self._owned: dict[bytes, dict[bytes, None]] = {}
        #: Groups that were removed before they were created here.
        self._never: dict[bytes, None] = {}
        #: Waiters of groups that are not created yet.
        self._early: dict[bytes, list[Waiter]] = {}
        self.clients.on_ended.append(self._creator_ended)

    # --- requests of clients ---------------------------------------------------------
    def create(
        self,
        id: bytes,
        bundles: list[dict[str, float]],
        strategy: str,
        name: str,
        namespace: str,
        detached: bool,
        selectors: list[dict[str, str]] | None,
    ) -> None:
        """Request a group; invalid bundles fail its waiters.

        Raises:
            ValueError: the name is taken.
        """
        if id in self._groups or id in self._removed:
            return  # repeated after the head before this one had kept it
        if (namespace, name) in self._names:
            raise ValueError(
                f"The name {name!r} is taken by another placement group in namespace "
                f"{namespace!r}. Use get_placement_group({name!r}) for it."
            )
        group = PlacementGroupEntry(id, name, namespace, detached, strategy, bundles, selectors)
        group.waiters = self._early.pop(id, [])
        self._groups[id] = group
        creator = owner_of(id)
        if id in self._never or (not detached and self.clients.get(creator) is None):
            self.remove(id)
            return
        if not detached:
            self._owned.setdefault(creator, {})[id] = None
        if name:
            self._names[namespace, name] = group
        try:
            group.state = GroupPlacement.of(id, bundles, strategy, selectors)
        except ValueError as error:
            group.error = error
            self._settle(group)
            return
        self.grants.create_group(group.state, self)
        if group.placed is None:
            self.on_change(group)

    def refuse(self, creator: bytes, why: str, id: bytes, *_: object) -> None:
        """Fail the waiters of a group whose request was refused."""
        error = ValueError(f"The placement group {id.hex()} cannot be made: {why}.")
        group = self._groups.get(id)
        if group is None and self.clients.get(creator) is not None:
            group = self._groups[id] = PlacementGroupEntry(id, "", "", False, "", [], None)
            group.waiters = self._early.pop(id, [])
            self._owned.setdefault(creator, {})[id] = None
        if group is not None:
            group.error = error
            self._settle(group)

    def pin(self, id: bytes, label: str) -> list[str]:
        """Keep a group on nodes with the values of a label that its nodes have now; return these.

        Bundles of a lost node then wait for another with its value. If not all bundles are placed,
        no values are returned and the group stays as it is.

        Raises:
            ValueError: a node of it has no such label.
        """
        group = self._groups.get(id)
        if group is None or group.state is None or group.status != GroupStatus.CREATED.value:
            return []
        nodes = self.grants.scheduler.nodes
        placed = [group.state.allocations[index] for index in range(len(group.bundles))]
        values = [nodes[held.node_id].labels.get(label, "") for held in placed]
        if not all(values):
            raise ValueError(
                f"A node of the placement group {short_id(id.hex())} has no label {label!r}."
            )
        selectors = group.selectors or [{} for _ in values]
        group.selectors = [
            {**selector, label: value} for selector, value in zip(selectors, values, strict=True)
        ]
        group.state.choose_nodes(group.selectors)
        self.on_change(group)
        return values

    def wait(self, waiter: Waiter, id: bytes) -> None:
        """Answer a request once the group is created, or cannot be."""
        group = self._groups.get(id) or self._removed.get(id)
        if group is not None:
            group.waiters.append(waiter)
            self._settle(group)
        elif self.clients.get(owner_of(id)) is None:
            self.clients.refuse(*waiter, PlacementGroupRemovedError(id.hex()))
        else:
            waiting = self._early.setdefault(id, [])
            waiting.append(waiter)
            if len(waiting) == 1:
                self.grants.timers.call_later(_EARLY_WAIT, lambda: self._never_came(id))

    def _never_came(self, id: bytes) -> None:
        for waiter in self._early.pop(id, ()):
            self.clients.refuse(*waiter, PlacementGroupRemovedError(id.hex()))

    def remove(self, id: bytes) -> None:
        """Remove a group with what runs in it; a group whose creation comes later is never made."""
        group = self._groups.pop(id, None)
        if group is None:
            self.forbid(id)
            return
        group.removed = True
        owned = self._owned.get(owner_of(id))
        if owned is not None:
            owned.pop(id, None)
        if self._names.get((group.namespace, group.name)) is group:
            del self._names[group.namespace, group.name]
        self._removed[id] = group
        if len(self._removed) > _REMEMBERED:
            self._removed.popitem(last=False)
        if group.state is not None:
            self.grants.remove_group(id)
        self.on_change(group)
        self._settle(group)

    def forbid(self, id: bytes) -> None:
        """Refuse to make a group, even if its creator requests it later."""
        self._never[id] = None
        if len(self._never) > _REMEMBERED:
            del self._never[next(iter(self._never))]

    def table(self, id: bytes | None) -> dict[str, Any]:
        """Return Ray's table of one group ({} if unknown), or of all by hex id."""
        if id is None:
            known: Sequence[Mapping[bytes, PlacementGroupEntry]] = (self._removed, self._groups)
            waits = self.grants.scheduler.explain_groups(_LOOKS)
            return {
                key.hex(): group.table(waits.get(key))
                for some in known
                for key, group in some.items()
            }
        group = self._groups.get(id) or self._removed.get(id)
        return {} if group is None else group.table(self.grants.scheduler.explain_group(id))

    def find(self, name: str, namespace: str) -> bytes | None:
        group = self._names.get((namespace, name))
        return None if group is None else group.id

    def all(self) -> list[PlacementGroupEntry]:
        return list(self._groups.values())

    def restore(self, group: PlacementGroupEntry) -> None:
        """Enter a group kept by an earlier head; its bundles await their nodes."""
        assert group.state is not None
        self._groups[group.id] = group
        if group.name:
            self._names[group.namespace, group.name] = group
        if not group.detached:
            self._owned.setdefault(owner_of(group.id), {})[group.id] = None
        self.grants.create_group(group.state, self)

    def reported(self, id: bytes) -> None:
        """Settle a group if the bundles that a node reported complete it."""
        group = self._groups.get(id)
        if group is not None and group.status == GroupStatus.CREATED.value:
            self.grants.group_is_placed(id)
            self._settle(group)

    def end_orphans(self) -> None:
        for creator in [c for c in self._owned if self.clients.get(c) is None]:
            for id in self._owned.pop(creator):
                self.remove(id)

    # --- what happens to them --------------------------------------------------------
    def placed(self, group_id: bytes) -> None:
        group = self._groups.get(group_id)
        if group is not None:
            if group.placed is None:
                group.placed = time.time()
            self.on_change(group)
            self._settle(group)

    def job_of(self, group_id: bytes) -> bytes:
        """Return the id of a group's job; empty if its creator is gone."""
        creator = self.clients.get(owner_of(group_id))
        return creator.job_id if creator is not None else b""

    def _settle(self, group: PlacementGroupEntry) -> None:
        error = group.error
        if group.removed:
            error = PlacementGroupRemovedError(group.id.hex())
        if error is None and group.status != GroupStatus.CREATED.value:
            return
        waiters, group.waiters = group.waiters, []
        for waiter in waiters:
            if error is None:
                self.clients.answer(*waiter, True)
            else:
                self.clients.refuse(*waiter, error)

    def _creator_ended(self, process_id: bytes, how: ProcessExit) -> None:
        # The latest first: capacity that one frees must not go to the next one to be removed.
        for id in reversed(self._owned.pop(process_id, {})):
            self.remove(id)
