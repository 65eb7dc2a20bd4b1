"""``inspect_serializability``: which part of a function, class or value cannot be pickled."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.values.serialization import at_fault

if TYPE_CHECKING:
    from typing import TextIO


@dataclasses.dataclass(frozen=True, eq=False)
class FailureTuple:
    """What cannot be pickled, and where it is.

    Attributes:
        obj: The thing itself.
        name: Where it is: an attribute, an item, a variable of a function.
        parent: What was inspected.
    """

    obj: Any
    name: str
    parent: Any

    def __repr__(self) -> str:
        return f"FailureTuple(obj={self.obj!r}, name={self.name!r}, parent={self.parent!r})"


def inspect_serializability(
    base_obj: Any,
    name: str | None = None,
    depth: int = 3,
    print_file: TextIO | None = None,
) -> tuple[bool, set[FailureTuple]]:
    """Tell whether something can be pickled, and print which part of it can not.

    Args:
        base_obj: A function, a class or a value.
        name: What it is called in the text. Default: its own name, or its type.
        depth: How deep parts of parts are looked at.
        print_file: Where the text is printed. Default: standard output.

    Returns:
        Whether it can be pickled, and the innermost part at fault, if not.
    """
    told = name or str(getattr(base_obj, "__qualname__", type(base_obj).__qualname__))
    found = at_fault(base_obj, depth)
    if found is None:
        print(f"{told} can be pickled.", file=print_file)
        return True, set()
    place, part, error = found
    where = f": {place} is a {type(part).__qualname__}" if place else ""
    print(f"{told} cannot be pickled{where} ({type(error).__name__}: {error}).", file=print_file)
    return False, {FailureTuple(part, place or told, base_obj)}
