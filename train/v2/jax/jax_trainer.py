"""Names at the path where Ray has them."""

from miniray.train.jax import JaxTrainer

__all__ = ["JaxTrainer"]
