"""A run's configuration as JSON values, for a person who looks into its folder later.

What looks like a secret is left out; what JSON has no form for becomes text.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
import re
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECRET = re.compile(r"(^|_)(key|token|secret|password|credentials?|auth)($|_)", re.IGNORECASE)
_HIDDEN = "(hidden)"

#: Longer text is cut, and so are longer lists.
_MAX_TEXT, _MAX_ITEMS = 2000, 200
#: Deeper values become text.
_MAX_DEPTH = 12


def describe_run(*, name: str, train_loop: Any, **configs: Any) -> dict[str, Any]:
    from miniray.version import VERSION

    function = getattr(train_loop, "func", train_loop)  # of functools.partial
    described = {
        "name": name,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "train_loop": f"{function.__module__}.{getattr(function, '__qualname__', function)}",
        **{key: plain(value) for key, value in configs.items()},
        "program": sys.argv[0] if sys.argv else "",  # arguments may hold secrets
        "python": platform.python_version(),
        "miniray": VERSION,
    }
    versions = {
        module: str(getattr(sys.modules[module], "__version__", ""))
        for module in ("torch", "numpy", "jax", "transformers", "lightning")
        if module in sys.modules  # what was never imported is not imported for this
    }
    return {**described, "libraries": versions}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON values."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value)
    if depth < _MAX_DEPTH:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return _mapping(fields, depth)
        if isinstance(value, dict):
            return _mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset):
            items = [plain(item, depth + 1) for item in itertools.islice(value, _MAX_ITEMS)]
            more = len(value) - len(items)
            return [*items, f"... and {more} more"] if more else items
    # A filesystem's text may hold the keys that it was made with.
    if type(value).__module__.partition(".")[0] in ("fsspec", "pyarrow", "s3fs", "gcsfs", "adlfs"):
        return type(value).__name__
    try:
        return _text(repr(value))
    except Exception:  # noqa: BLE001 - code of the user, and no reason to refuse a run
        return type(value).__name__


def _mapping(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {
        str(key): _HIDDEN
        if isinstance(value, str) and _SECRET.search(str(key))
        else plain(value, depth + 1)
        for key, value in values.items()
    }


def _text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
