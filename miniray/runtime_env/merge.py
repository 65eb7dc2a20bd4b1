"""Combines environments, and names the result so that workers can be pooled by it.

Works on environments that ``validate`` has brought into their one form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Keys that say how an environment is made, not what it is.
_NOT_IDENTITY = frozenset({"config", "excludes"})


def merge(parent: Mapping[str, Any] | None, child: Mapping[str, Any] | None) -> dict[str, Any]:
    """The environment of a task or actor within that of its job or its creator.

    As in Ray, each key of the child replaces the parent's, except that ``env_vars``
    are merged variable by variable.

    Args:
        parent: Environment of the job, or of the task or actor that submits.
        child: Environment given with the task or actor.
    """
    merged = {**(parent or {}), **(child or {})}
    variables = {
        **(parent or {}).get("env_vars", {}),
        **(child or {}).get("env_vars", {}),
    }
    if variables:
        merged["env_vars"] = variables
    return merged


def env_key(spec: Mapping[str, Any] | None) -> str:
    """A name that two environments share exactly when they are the same.

    It is the same in every process and on every machine. Local paths stand for
    themselves, so compute it after ``upload`` where content counts.

    Args:
        spec: A validated environment.

    Returns:
        32 hexadecimal digits, or "" for an empty environment.
    """
    identity = {
        key: value for key, value in (spec or {}).items() if value and key not in _NOT_IDENTITY
    }
    if not identity:
        return ""
    import hashlib
    import json

    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]
