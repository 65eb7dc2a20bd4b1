"""``JaxTrainer``, under the path at which Ray has it."""

from __future__ import annotations

from miniray.train.jax import JaxTrainer

__all__ = ["JaxTrainer"]
