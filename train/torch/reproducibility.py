"""``enable_reproducibility``: the same seed, the same results, as far as PyTorch can."""

from __future__ import annotations

import logging
import os
import random

import torch

logger = logging.getLogger(__name__)


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python, NumPy and PyTorch, and let PyTorch use deterministic algorithms.

    Processes of data loaders get their seeds from PyTorch's, so they are covered. Call it before
    anything is computed on a GPU.

    Args:
        seed: The seed.

    Raises:
        ValueError: The seed is not a whole number from 0 to 2**32 - 1, as NumPy wants it.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(
            f"enable_reproducibility(seed={seed!r}) must be a whole number from 0 to 2**32 - 1."
        )
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy as np
    except ImportError:
        logger.debug("NumPy is not installed, so it needs no seed.")
    else:
        np.random.seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
