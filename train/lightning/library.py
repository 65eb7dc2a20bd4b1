"""Finds Lightning, which has two package names."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def lightning() -> Any:
    """The module ``lightning.pytorch`` or ``pytorch_lightning``: the one that the user has loaded.

    Classes of the one are strange to the other, so the choice matters where both are installed.

    Raises:
        ImportError: Neither is installed.
    """
    names = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        names.reverse()
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:  # noqa: PERF203 - there are two
            if error.name not in ("lightning", "pytorch_lightning"):
                raise
    raise ImportError(
        "miniray.train.lightning needs PyTorch Lightning, which is not installed. "
        "Run `pip install lightning`."
    )
