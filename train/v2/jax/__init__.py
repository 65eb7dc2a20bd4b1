"""Names at the path where Ray has them."""

from miniray.train.jax import JaxConfig, JaxTrainer

__all__ = ["JaxConfig", "JaxTrainer"]
