"""Label selectors: which nodes a demand or a bundle accepts by their labels.

Responsible for parsing and matching; not for where selectors come from. The
operators and their meaning are Ray's: ``"v"``, ``"!v"``, ``"in(a,b)"``, ``"!in(a,b)"``,
``"exists()"`` and ``"!exists()"``. Our own are ``"same(s)"``, for bundles only, and ``&`` between
conditions of one label, which users can't write.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_VALUE = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?")
_KEY_PREFIX = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?")
_CONDITION = re.compile(
    r"(?P<negated>!?)(?:in\((?P<many>[^()]*)\)|(?P<there>exists\(\))|(?P<one>[^()!]*))"
    r"|same\((?P<same>[^()!]*)\)"
)


class LabelConstraint(NamedTuple):
    """One condition: the label ``key`` has one of ``values``, or, negated, none of them.

    A node without the label fails a plain condition and meets a negated one. The
    empty value is a value like any other: ``{"k": ""}`` asks for a label ``k`` that
    is there and empty.
    """

    key: str
    values: tuple[str, ...]
    negated: bool = False
    #: The label has to be there, with any value; ``values`` is empty.
    exists: bool = False
    #: Set of bundles whose nodes have one value of the label, and other sets' another one. What
    #: the value is concerns the group: by itself it says that the label has to be there.
    same: str = ""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels meets the condition."""
        if self.exists:
            return (self.key in labels) != self.negated
        return (labels.get(self.key) in self.values) != self.negated

    def __str__(self) -> str:
        if self.same:
            return f"{self.key}=same({self.same})"
        sign = "!" if self.negated else ""
        if self.exists:
            return f"{self.key}={sign}exists()"
        if len(self.values) == 1:
            return f"{self.key}={sign}{self.values[0]}"
        return f"{self.key}={sign}in({','.join(self.values)})"


#: All conditions hold together; the empty selector accepts every node.
LabelSelector = tuple[LabelConstraint, ...]


def parse_selector(selector: Mapping[str, str] | None, *, of_bundle: bool = False) -> LabelSelector:
    """Parse what users write into a selector.

    Args:
        selector: condition per label key, such as ``{"zone": "in(a,b)", "tier": "!spot"}``.
        of_bundle: whether ``same(...)`` means something.

    Returns:
        The conditions, sorted by key, so that equal selectors compare equal.

    Raises:
        ValueError: a key or a condition is malformed.
    """
    if not selector:
        return ()
    found = tuple(
        _parse_condition(key, text) for key in sorted(selector) for text in selector[key].split("&")
    )
    if not of_bundle and any(constraint.same for constraint in found):
        raise ValueError(f"the condition same(...) is for bundles only: {describe(found)}")
    return found


def matches(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels meets every condition of the selector."""
    return all(constraint.matches(labels) for constraint in selector)


def first_match(selectors: Sequence[LabelSelector], labels: Mapping[str, str]) -> int | None:
    """Which of several selectors, the best first, a node with these labels meets; None: none."""
    return next((at for at, each in enumerate(selectors) if matches(each, labels)), None)


def describe(selector: LabelSelector) -> str:
    """The selector on one line, for messages: ``zone=in(a,b), tier=!spot``."""
    return ", ".join(str(constraint) for constraint in selector)


def describe_all(selectors: Sequence[LabelSelector]) -> str:
    """Several selectors, of which one must be met, on one line."""
    return " or ".join(describe(each) for each in selectors)


def _parse_condition(key: str, text: str) -> LabelConstraint:
    _check_key(key)
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(
            f"the label selector {text!r} of {key!r} is not one of "
            '"value", "!value", "in(a,b)", "!in(a,b)", "exists()" and "!exists()"'
        )
    if found["same"] is not None:
        _check_value(key, text, found["same"])
        return LabelConstraint(key, (), exists=True, same=found["same"])
    negated = bool(found["negated"])
    if found["there"] is not None:
        return LabelConstraint(key, (), negated, exists=True)
    values: tuple[str, ...] = (found["one"],)
    if values == ("",) and not negated:
        return LabelConstraint(key, values)
    if found["many"] is not None:
        values = tuple(sorted({value.strip() for value in found["many"].split(",")}))
    for value in values:
        _check_value(key, text, value)
    return LabelConstraint(key, values, negated)


def _check_value(key: str, text: str, value: str) -> None:
    if not _VALUE.fullmatch(value):
        raise ValueError(
            f"the label selector {text!r} of {key!r} names the value {value!r}; a value has "
            "1 to 63 letters, digits, '-', '_' or '.', with a letter or digit at both ends"
        )


def _check_key(key: str) -> None:
    prefix, slash, name = key.rpartition("/")
    if _VALUE.fullmatch(name) and (not slash or _KEY_PREFIX.fullmatch(prefix)):
        return
    raise ValueError(
        f"the label key {key!r} is malformed; a key is a name of 1 to 63 letters, digits, '-', "
        "'_' or '.', with a letter or digit at both ends, and may have a domain and '/' before it"
    )


def shared_label(selectors: Sequence[LabelSelector]) -> str | None:
    """The label by which the bundles of a group form sets; None if they form none.

    Raises:
        ValueError: Only some bundles have such a condition, or one has several, or they are
            on several labels: values could not be chosen one after the other then.
    """
    keys = [[each.key for each in selector if each.same] for selector in selectors]
    if not any(keys):
        return None
    if any(len(each) != 1 for each in keys) or len({key for key, *_ in keys}) != 1:
        raise ValueError(
            "the condition same(...) must be on one label, and in the selector of every bundle"
        )
    return keys[0][0]


def set_name(selector: LabelSelector) -> str:
    """Which set a bundle belongs to; empty if the group has no sets."""
    return next((each.same for each in selector if each.same), "")
