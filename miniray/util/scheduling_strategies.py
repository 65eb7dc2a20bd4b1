"""Where a task or actor may run: the values of the option ``scheduling_strategy``.

Besides these classes the option takes "DEFAULT" and "SPREAD". The classes hold and
check what the user wrote; ``options.py`` turns them into placements.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from miniray.system.option_checks import boolean, plain_text, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.util.placement_group import PlacementGroup


@dataclasses.dataclass(eq=False)
class PlacementGroupSchedulingStrategy:
    """Run in a bundle of a placement group.

    Args:
        placement_group: The group; None means in no group, even if that of the caller captures;
            "default" means in that, if it does.
        placement_group_bundle_index: Index of the bundle; -1 means any.
        placement_group_capture_child_tasks: Whether what the task or actor starts runs in the
            group too, unless it says otherwise. Default: as the caller's group does; False if it
            is in none.
    """

    placement_group: PlacementGroup | Literal["default"] | None
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool | None = None


class NodeAffinitySchedulingStrategy:
    """Run on one node.

    Args:
        node_id: Hex id of the node, as in ``miniray.nodes()``.
        soft: Whether another node will do when that one is gone or can never hold it.

    Raises:
        ValueError: ``node_id`` is not a hex string.
    """

    def __init__(self, node_id: str, soft: bool) -> None:
        try:
            bytes.fromhex(text("node_id", node_id))
        except ValueError:
            raise ValueError(
                f"node_id must be a hex string as in miniray.nodes(), not {node_id!r}."
            ) from None
        self.node_id = node_id
        self.soft = boolean("soft", soft)


class _Values:
    """An operator with at least one value."""

    _word: str

    def __init__(self, *values: str) -> None:
        name = type(self).__name__
        if not values:
            raise ValueError(f'{name} needs at least one value: {name}("a", "b").')
        for value in values:
            if not isinstance(value, str):
                raise ValueError(f"The values of {name} must be strings, not {value!r}.")
        self.values = list(values)

    def condition(self) -> str:
        """Return the condition as ``label_selector`` writes it."""
        return f"{self._word}({','.join(self.values)})"


class In(_Values):
    """The label has one of the values."""

    _word = "in"


class NotIn(_Values):
    """The label has none of the values, or is absent."""

    _word = "!in"


class Exists:
    """The node has the label."""

    def condition(self) -> str:
        """Return the condition as ``label_selector`` writes it."""
        return "exists()"


class DoesNotExist:
    """The node does not have the label."""

    def condition(self) -> str:
        """Return the condition as ``label_selector`` writes it."""
        return "!exists()"


LabelOperator = In | NotIn | Exists | DoesNotExist


class NodeLabelSchedulingStrategy:
    """Run on a node with certain labels.

    Args:
        hard: Conditions that must hold: ``{"region": In("us"), "gpu": Exists()}``.
        soft: Conditions that are a wish: nodes that meet them too are used before others, as long
            as they have capacity.

    Raises:
        ValueError: Both are empty, or a condition is not one of the operators.
    """

    def __init__(
        self,
        hard: Mapping[str, LabelOperator] | None,
        *,
        soft: Mapping[str, LabelOperator] | None = None,
    ) -> None:
        self.hard = _conditions("hard", hard)
        self.soft = _conditions("soft", soft)
        if not self.hard and not self.soft:
            raise ValueError("hard and soft of NodeLabelSchedulingStrategy can't both be empty.")


def _conditions(name: str, given: Mapping[str, LabelOperator] | None) -> dict[str, str]:
    """Return the conditions as ``label_selector`` writes them."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f'{name} must be a dict like {{"label": In("value")}}, not {given!r}.')
    for key, operator in given.items():
        if not isinstance(key, str):
            raise ValueError(f"The labels in {name} must be strings, not {key!r}.")
        if not isinstance(operator, LabelOperator):
            raise ValueError(
                f"{name}[{key!r}] must be In(...), NotIn(...), Exists() or DoesNotExist(), "
                f"not {operator!r}."
            )
    return {plain_text(key): operator.condition() for key, operator in given.items()}


SchedulingStrategyT = (
    None
    | str
    | PlacementGroupSchedulingStrategy
    | NodeAffinitySchedulingStrategy
    | NodeLabelSchedulingStrategy
)
