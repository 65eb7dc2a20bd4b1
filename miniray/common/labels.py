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

#: Kubernetes' rule for labels, which Ray follows: an optional domain, then a name.
_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = rf"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]{{0,251}}[a-zA-Z0-9])?/)?{_NAME}"
_VALUE = rf"(?:{_NAME})?"
_CONDITION = (
    rf"(?P<negated>!?)(?:in\((?P<many>{_NAME}(?: *, *{_NAME})*)\)|(?P<there>exists\(\))"
    rf"|(?P<one>{_NAME}))|same\((?P<same>{_NAME})\)|(?P<empty>)"
)
_FORM = "letters, digits, '-', '_' or '.', with a letter or digit at both ends"


class LabelConstraint(NamedTuple):
    """One condition: the label ``key`` has one of ``values``, or, negated, none of them.

    A node without the label fails a plain condition and meets a negated one. The
    empty value is a value like any other: ``{"k": ""}`` requires a label ``k`` that is there and
    empty.
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
        """Return whether a node with these labels meets the condition."""
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
        of_bundle: whether ``same(...)`` is allowed.

    Returns:
        The conditions, sorted by key, so that equal selectors compare equal.

    Raises:
        ValueError: a key or a condition is malformed.
    """
    selector = selector or {}
    for key in selector:
        check_key("the label key", key)
    return tuple(
        parse_condition(f"the label selector of {key!r}", key, text, of_bundle)
        for key in sorted(selector)
        for text in selector[key].split("&")
    )


def parse_condition(where: str, key: str, text: str, of_bundle: bool = False) -> LabelConstraint:
    """Parse one condition; the parameters are as of ``parse_selector``.

    Raises:
        ValueError: The condition is malformed; the text begins with ``where``.
    """
    found = re.fullmatch(_CONDITION, text)
    if found is not None and found["same"] and not of_bundle:
        raise ValueError(f"{where} can't be {text!r}, which is for bundles only.")
    if found is None:
        raise ValueError(
            f"{where} must be a value, '!value', 'in(a, b)', '!in(a, b)', 'exists()' or "
            f"'!exists()', not {text!r}; a value is 1 to 63 {_FORM}."
        )
    if found["same"]:
        return LabelConstraint(key, (), exists=True, same=found["same"])
    negated = bool(found["negated"])
    if found["there"]:
        return LabelConstraint(key, (), negated, exists=True)
    values = (found["many"] or found["one"] or "").split(",")
    return LabelConstraint(key, tuple(sorted({value.strip() for value in values})), negated)


def check_key(where: str, key: str) -> None:
    """Raise ValueError, whose text begins with ``where``, if a label can't have this key."""
    if not re.fullmatch(_KEY, key):
        raise ValueError(
            f"{where} must be 1 to 63 {_FORM}, and an optional 'domain/' before it, not {key!r}."
        )


def check_value(where: str, value: str) -> None:
    """Raise ValueError, whose text begins with ``where``, if a label can't have this value."""
    if not re.fullmatch(_VALUE, value):
        raise ValueError(f"{where} must be up to 63 {_FORM}, not {value!r}.")


def matches(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels meets every condition of the selector."""
    return all(constraint.matches(labels) for constraint in selector)


def first_match(selectors: Sequence[LabelSelector], labels: Mapping[str, str]) -> int | None:
    """Return the index of the first selector that a node with these labels meets, or None."""
    return next((at for at, each in enumerate(selectors) if matches(each, labels)), None)


def describe(selector: LabelSelector) -> str:
    """Return the selector on one line, for messages: ``zone=in(a,b), tier=!spot``."""
    return ", ".join(str(constraint) for constraint in selector)


def describe_all(selectors: Sequence[LabelSelector]) -> str:
    """Write several selectors, one of which must be met, on one line."""
    return " or ".join(describe(each) for each in selectors)


def shared_label(selectors: Sequence[LabelSelector]) -> str | None:
    """Return the label by which the bundles of a group form sets; None if they form none.

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
    """Return which set a bundle belongs to; empty if the group has no sets."""
    return next((each.same for each in selector if each.same), "")
