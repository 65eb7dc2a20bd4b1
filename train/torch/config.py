"""``TorchConfig``: how the process group of a run is made."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from miniray.train.config.checks import check_text, is_amount
from miniray.train.worker.backend import BackendConfig

if TYPE_CHECKING:
    from miniray.train.torch.backend import TorchBackend

INIT_METHODS = ("env", "tcp")


@dataclasses.dataclass
class TorchConfig(BackendConfig):
    """How the process group of a run is made.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or another that PyTorch knows, also one for each device as
            in ``"cpu:gloo,cuda:nccl"``. Default: nccl when workers hold GPUs that PyTorch can
            use, else gloo. NCCL refuses two ranks on one device, so workers that share a GPU get
            gloo as well.
        init_method: ``"env"`` or ``"tcp"``, as in Ray. The ranks meet in the same way for both:
            at a port on which rank 0 listens, named by MASTER_ADDR and MASTER_PORT.
        timeout_s: Seconds after which operations of the group fail.

    Raises:
        ValueError: A value makes no sense; the message says what is allowed.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        check_text("TorchConfig(backend", self.backend, "gloo")
        if self.init_method not in INIT_METHODS:
            raise ValueError(
                f"TorchConfig(init_method={self.init_method!r}) is not known. "
                f"Use one of {', '.join(INIT_METHODS)}."
            )
        if not is_amount(self.timeout_s) or self.timeout_s == 0:
            raise ValueError(
                f"TorchConfig(timeout_s={self.timeout_s!r}) must be a number above 0 seconds."
            )

    def make_backend(self) -> TorchBackend:
        """The backend that makes this process group."""
        from miniray.train.torch.backend import TorchBackend

        return TorchBackend(self)
