"""``Result``, under the path at which Ray has it."""

from __future__ import annotations

from miniray.train import Result

__all__ = ["Result"]
