"""Names at the path where Ray has them."""

from miniray.train import UserCallback

__all__ = ["UserCallback"]
