"""The names of ``miniray.train.jax``, under the path at which Ray has them."""

from __future__ import annotations

from miniray.train.jax import JaxConfig, JaxTrainer

__all__ = ["JaxConfig", "JaxTrainer"]
