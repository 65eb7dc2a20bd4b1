"""Training with JAX, with the public names of Ray Train's JAX module.

JAX itself is loaded by the workers only.
"""

from __future__ import annotations

from miniray.train.jax.config import JaxConfig, JaxTrainer

__all__ = ["JaxConfig", "JaxTrainer"]
