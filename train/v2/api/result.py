"""Names at the path where Ray has them."""

from miniray.train import Result

__all__ = ["Result"]
