"""Which records a listing of the cluster's state returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from miniray.util.state_records import State

if TYPE_CHECKING:
    from collections.abc import Sequence

#: (field, "=" or "!=", value); all of them must hold.
Filter = tuple[str, str, Any]

StateT = TypeVar("StateT", bound=State)


def check_all(kind: type[State], filters: Sequence[Filter] | None, limit: int) -> None:
    """Refuse what no listing can answer, before anybody is asked."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}.")
    for condition in filters or ():
        _check(condition, kind)


def chosen(records: list[StateT], filters: Sequence[Filter] | None, limit: int) -> list[StateT]:
    """The first records of those for which all conditions hold."""
    found = [record for record in records if all(_holds(record, each) for each in filters or ())]
    return found[:limit]


def _check(condition: Filter, kind: type[State]) -> None:
    if not isinstance(condition, (tuple, list)) or len(condition) != 3:
        raise ValueError(f"A filter is (field, '=' or '!=', value), not {condition!r}.")
    field, predicate, _ = condition
    known = sorted(kind.__dataclass_fields__)
    if field not in known:
        raise ValueError(f"{kind.__name__} has no field {field!r} to filter by; it has {known}.")
    if predicate not in ("=", "!="):
        raise ValueError(f"The predicate of a filter is '=' or '!=', not {predicate!r}.")


def _holds(record: State, condition: Filter) -> bool:
    field, predicate, value = condition
    return _same(record[field], value) == (predicate == "=")


def _same(actual: Any, wanted: Any) -> bool:
    """Texts match without regard to case, and may stand for numbers and truth, as in Ray."""
    if isinstance(wanted, str) and (actual is None or isinstance(actual, (str, int, float))):
        return str(actual).lower() == wanted.lower()
    return bool(actual == wanted)
