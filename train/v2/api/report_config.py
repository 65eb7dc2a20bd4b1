"""Options of reports, under the path at which Ray has them."""

from __future__ import annotations

from miniray.train import CheckpointConsistencyMode, CheckpointUploadMode

__all__ = ["CheckpointConsistencyMode", "CheckpointUploadMode"]
