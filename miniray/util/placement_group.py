"""Placement groups: bundles of resources that are reserved together, or not at all.

Here are the handle, the functions on it, and the checks of users' arguments;
placing the bundles is the head's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.common.runtime import current_runtime
from miniray.exceptions import GetTimeoutError, PlacementGroupRemovedError
from miniray.objects.ref_checks import timeout_of
from miniray.system import option_checks as check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.common.object_ref import ObjectRef

#: PACK: on as few nodes as possible. SPREAD: on as many as possible. STRICT_PACK: all on
#: one node. STRICT_SPREAD: each on a node of its own.
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

#: The label that each node has a value of its own of, under its two names.
_NODE_LABELS = ("ray.io/node-id", "miniray.io/node-id")
#: On one value of the label: all bundles are in one set.
_TOGETHER = "same(all)"

#: Bundles of a group: the head looks at all of them in one turn, 0.1 ms each.
_MOST_BUNDLES = 10_000

_EXAMPLE = '[{"CPU": 1}, {"GPU": 0.5}]'


class PlacementGroup:
    """A handle to a placement group; can be passed to tasks and actors.

    Attributes:
        id: Id of the group, as bytes.
    """

    __slots__ = ("_bundles", "id")

    def __init__(self, id: bytes, bundle_cache: Sequence[Mapping[str, float]] | None = None):
        self.id = id
        self._bundles = None if bundle_cache is None else [dict(bundle) for bundle in bundle_cache]

    @staticmethod
    def empty() -> PlacementGroup:
        """Return the handle that stands for no group."""
        return PlacementGroup(b"", [])

    @property
    def is_empty(self) -> bool:
        """Whether this stands for no group."""
        return not self.id

    @property
    def bundle_cache(self) -> list[dict[str, float]] | None:
        """The bundles, if this handle has them already."""
        return self._bundles

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        """The bundles, as requested.

        Raises:
            PlacementGroupRemovedError: Neither this handle nor the head has them.
        """
        if self._bundles is None:
            table = current_runtime().head.placement_group_table(self.id)
            if not table:  # unknown, or removed so long ago that it is forgotten
                raise PlacementGroupRemovedError(self.id.hex())
            self._bundles = [dict(bundle) for bundle in table["bundles"].values()]
        return self._bundles

    @property
    def bundle_count(self) -> int:
        """The number of bundles."""
        return len(self.bundle_specs)

    def ready(self) -> ObjectRef[PlacementGroup]:
        """Return a ref to this group that becomes ready when all bundles are reserved."""
        if self.is_empty:
            return current_runtime().objects.put(self)
        return current_runtime().head.placement_group_ready(self.id, self)

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Wait until all bundles are reserved.

        Args:
            timeout_seconds: How long to wait at most.

        Returns:
            Whether they are.

        Raises:
            PlacementGroupRemovedError: The group was removed.
            TypeError, ValueError: ``timeout_seconds`` is not a number, or is negative.
        """
        timeout = timeout_of("wait", timeout_seconds)
        try:
            current_runtime().objects.get([self.ready()], timeout)
        except GetTimeoutError:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementGroup) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"PlacementGroup({self.id.hex()})"

    def __reduce__(self) -> tuple[type[PlacementGroup], tuple[Any, ...]]:
        return PlacementGroup, (self.id, self._bundles)


def placement_group(
    bundles: list[dict[str, float]],
    strategy: str | None = None,
    name: str = "",
    lifetime: str | None = None,
    *,
    bundle_label_selector: list[dict[str, str]] | None = None,
    topology_strategy: dict[str, str] | None = None,
) -> PlacementGroup:
    """Ask for a placement group, and return at once.

    Args:
        bundles: Amounts by resource name, one dict per bundle.
        strategy: "PACK" (the default), "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        name: A name for ``get_placement_group``.
        lifetime: None to remove the group when its creator ends, or "detached".
        bundle_label_selector: Conditions on the labels of the nodes, one dict per bundle. Beside
            those of ``label_selector`` there is ``"same(a)"``: all bundles with it are on nodes
            with one value of the label, whichever has capacity, and those with ``"same(b)"`` on
            nodes with another one. Every bundle of the group has it then, on the same label.
        topology_strategy: Instead of ``strategy``, a strategy for each label: any under
            ``ray.io/node-id``, and "STRICT_PACK" under at most one other label, on one value of
            which all bundles are then: ``{"ray.io/gpu-domain": "STRICT_PACK"}``.

    Raises:
        ValueError: The bundles, the strategy or the lifetime are not valid, or the name is taken.
    """
    wanted = check_bundles(bundles)
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(
            f"{strategy!r} is not a placement group strategy."
            f"{check.suggestion(str(strategy), STRATEGIES)} The strategies are "
            f"{', '.join(STRATEGIES)}."
        )
    if not isinstance(name, str):
        raise check.wrong_type("name", name, "a string")
    if lifetime not in (None, "detached"):
        raise ValueError(f'lifetime must be None or "detached", not {lifetime!r}.')
    strategy, selectors = _apply_topology(
        topology_strategy,
        strategy,
        _check_selectors(bundle_label_selector, len(wanted)),
        len(wanted),
    )
    _check_sets(selectors)
    group = PlacementGroup(b"", wanted)  # first: Ctrl-C must not come between the group and it
    group.id = current_runtime().head.create_placement_group(
        wanted,
        check.plain_text(strategy or "PACK"),
        name=check.plain_text(name),
        lifetime=lifetime,
        bundle_label_selector=selectors,
    )
    return group


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """Release a group's resources; tasks and actors that run in it end.

    Later requests of this process find the group removed. A group of its own,
    without a name, is removed without waiting: another process may find it for a moment longer.
    """
    current_runtime().head.remove_placement_group(_checked(placement_group).id)


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """Look up a placement group by its name.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is empty, or there is no group of it in the namespace.
    """
    name = check.text("placement_group_name", placement_group_name)
    runtime = current_runtime()
    id = runtime.head.find_placement_group(name, None)
    if id is None:
        raise ValueError(
            f"There is no placement group named {name!r} in namespace "
            f"{runtime.context().namespace!r}."
        )
    return PlacementGroup(id)


def placement_group_table(placement_group: PlacementGroup | None = None) -> dict[str, Any]:
    """Return what is known of a group (bundles, strategy, state), or of all by hex id.

    For a group that waits, ``["stats"]["scheduling_state"]`` says whether there is too little
    capacity now ("NO_RESOURCES") or on all nodes together ("INFEASIBLE"). Of many different groups
    that wait in a large cluster, the table of all says of the later ones only that they do
    ("QUEUED").
    """
    id = None if placement_group is None else _checked(placement_group).id
    return current_runtime().head.placement_group_table(id)


def get_current_placement_group() -> PlacementGroup | None:
    """Return the group that the current task or actor runs in, or None."""
    id = current_runtime().context().placement_group_id
    return None if id is None else PlacementGroup(id)


def _checked(group: Any) -> PlacementGroup:
    if not isinstance(group, PlacementGroup):
        raise check.wrong_type("placement_group", group, "a PlacementGroup")
    return group


def check_bundles(bundles: Any) -> list[dict[str, float]]:
    """Return the bundles without amounts of zero.

    Raises:
        ValueError: The bundles are not a list of non-empty dicts of valid amounts, or too many.
    """
    if not isinstance(bundles, list) or not bundles:
        raise ValueError(
            f"bundles must be a non-empty list like {_EXAMPLE}, not {check.shown(bundles)}."
        )
    if len(bundles) > _MOST_BUNDLES:
        raise ValueError(
            f"bundles must be at most {_MOST_BUNDLES:,}, not {len(bundles):,}. Make several groups."
        )
    return [_check_bundle(index, bundle) for index, bundle in enumerate(bundles)]


def _check_bundle(index: int, bundle: Any) -> dict[str, float]:
    where = f"bundles[{index}]"
    if not isinstance(bundle, Mapping):
        raise ValueError(
            f"{where} must be a dict of resource name to amount, not {check.shown(bundle)}."
        )
    amounts = {}
    for resource, given in bundle.items():
        if not isinstance(resource, str) or not resource:
            raise ValueError(
                f"{where} has the key {resource!r}; resource names are strings that are not empty."
            )
        try:
            asked = check.amount(f"{where}[{resource!r}]", given, resource)
        except TypeError as error:
            raise ValueError(str(error)) from None
        amounts[check.plain_text(resource)] = asked
    wanted = {resource: amount for resource, amount in amounts.items() if amount}
    if not wanted:
        raise ValueError(f"{where} asks for nothing: {check.shown(bundle)}.")
    return wanted


def _check_selectors(given: Any, count: int) -> list[dict[str, str]] | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(
            f"bundle_label_selector must be a list of {count} dicts, one per bundle, "
            f"not {check.shown(given)}."
        )
    return [
        check.label_selector(f"bundle_label_selector[{index}]", selector, of_bundle=True)
        for index, selector in enumerate(given)
    ]


def _check_sets(selectors: list[dict[str, str]] | None) -> None:
    """Refuse bundles that could not be divided into sets with one value of a label each."""
    if any("same(" in text for selector in selectors or () for text in selector.values()):
        from miniray.common.labels import parse_selector, shared_label

        try:
            shared_label([parse_selector(each, of_bundle=True) for each in selectors or ()])
        except ValueError as error:
            raise ValueError(f"bundle_label_selector can't be met: {error}.") from None


def _apply_topology(
    given: Any, strategy: str | None, selectors: list[dict[str, str]] | None, count: int
) -> tuple[str | None, list[dict[str, str]] | None]:
    """Return the strategy over nodes, and the selectors, that a topology strategy amounts to."""
    if given is None:
        return strategy, selectors
    if strategy is not None:
        raise ValueError(
            f"strategy and topology_strategy can't be given together: write the strategy over "
            f"nodes as topology_strategy[{_NODE_LABELS[0]!r}]."
        )
    if not isinstance(given, dict):
        raise ValueError(
            f"topology_strategy must be a dict of label to strategy, not {check.shown(given)}."
        )
    over_nodes: str | None = None
    labels = []
    for key, value in given.items():
        name = f"topology_strategy[{key!r}]"
        if value not in STRATEGIES:
            raise ValueError(f"{name} must be one of {', '.join(STRATEGIES)}, not {value!r}.")
        if key in _NODE_LABELS:
            over_nodes = value
        elif value != "STRICT_PACK":
            raise ValueError(f'{name} must be "STRICT_PACK", the only one for such labels.')
        else:
            labels.append(key)
    if len(labels) > 1:
        raise ValueError(f"topology_strategy can have one label beside the node's, not {labels}.")
    for key in check.label_selector("topology_strategy", dict.fromkeys(labels, "exists()")):
        selectors = [
            {**each, key: f"{each[key]}&{_TOGETHER}" if key in each else _TOGETHER}
            for each in selectors or [{}] * count
        ]
    return over_nodes, selectors


def check_fits(group: PlacementGroup, index: int, demand: Mapping[str, float]) -> None:
    """Check that a demand can ever be met by a group's bundles, as far as they are known.

    Raises:
        ValueError: There is no such bundle, or none that is large enough.
    """
    bundles = group.bundle_cache
    if bundles is None:
        return
    if index >= len(bundles):
        raise ValueError(
            f"placement_group_bundle_index must be at most {len(bundles) - 1}, as the group has "
            f"{len(bundles)} bundles, not {index}."
        )
    candidates = bundles if index == -1 else [bundles[index]]
    if any(
        all(bundle.get(resource, 0) >= needed for resource, needed in demand.items())
        for bundle in candidates
    ):
        return
    where = "any bundle" if index == -1 else f"bundle {index}"
    hint = ""
    if demand.get("CPU") == 1 and all(bundle.get("CPU", 0) < 1 for bundle in candidates):
        hint = (
            " Tasks need 1 CPU, and actors 1 CPU to be placed, unless num_cpus says otherwise: "
            "add CPU to the bundle, or give num_cpus=0."
        )
    raise ValueError(
        f"The demand {dict(demand)} does not fit into {where} of the placement group, which has "
        f"{candidates}.{hint}"
    )
