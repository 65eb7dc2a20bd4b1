"""Automatic mixed precision: ``accelerate``, ``prepare_optimizer``, ``backward``.

What ``accelerate`` has set holds until the train loop of the process ends.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from miniray.common.series import COUNTED, SECONDS, took
from miniray.train.data.devices import own_devices
from miniray.train.worker.context import current_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.worker.session import RankSession


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """How a train loop computes.

    Attributes:
        scaler: Scales losses so that float16 gradients do not vanish; None where that can't
            happen: on a CPU, where the lower precision is bfloat16.
    """

    enabled: bool
    scaler: torch.amp.GradScaler | None = None


_OFF = MixedPrecision(enabled=False)
_chosen: weakref.WeakKeyDictionary[RankSession, MixedPrecision] = weakref.WeakKeyDictionary()


def accelerate(amp: bool = False) -> None:
    """Choose how this train loop computes; call it before the ``prepare_`` functions.

    Args:
        amp: Whether models that ``prepare_model`` is given run in mixed precision: float16 with
            scaled losses on GPUs, bfloat16 on CPUs.

    Raises:
        ValueError: ``amp`` is not True or False.
        RuntimeError: Called a second time, after a ``prepare_`` function, or outside a train loop.
    """
    session = current_session("torch.accelerate")
    if not isinstance(amp, bool):
        raise ValueError(f"accelerate(amp={amp!r}) must be True or False.")
    if session in _chosen:
        raise RuntimeError(
            "miniray.train.torch.accelerate() can be called only once, and before prepare_model(), "
            "prepare_optimizer() and backward()."
        )
    scaled = amp and own_devices()[0].type == "cuda"
    _chosen[session] = MixedPrecision(amp, torch.amp.GradScaler("cuda") if scaled else None)


def _precision(function: str) -> MixedPrecision:
    """Return what was chosen; from now on it stays."""
    return _chosen.setdefault(current_session(function), _OFF)


def autocast_forward(model: torch.nn.Module, device: torch.device) -> None:
    """Let a model's forward pass run in mixed precision, if ``accelerate`` chose so."""
    if _precision("torch.prepare_model").enabled:
        model.forward = AutocastForward(model, device.type)


class AutocastForward:
    """A module's forward pass in mixed precision; can be pickled and copied with the module."""

    def __init__(self, model: torch.nn.Module, device_type: str) -> None:
        self._model = model
        self._device_type = device_type
        # A forward that was replaced before, as torch.compile does, is kept.
        self._replaced: Callable[..., Any] | None = model.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type):
            if self._replaced is not None:
                return self._replaced(*args, **kwargs)
            return type(self._model).forward(self._model, *args, **kwargs)


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer that undoes the scaling of ``backward``, if there is one.

    Its steps are in the cluster's metrics.

    Args:
        optimizer: The optimizer.

    Returns:
        The same optimizer where losses are not scaled.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    scaler = _precision("torch.prepare_optimizer").scaler
    _count_steps(optimizer, current_session("torch.prepare_optimizer"))
    return optimizer if scaler is None else ScaledOptimizer(optimizer, scaler)


def _count_steps(optimizer: torch.optim.Optimizer, session: RankSession) -> None:
    """Count an optimizer's steps, and the time between two of them."""
    run = ("run", session.storage.name)
    rank = ("rank", str(session.ranks.world_rank))
    steps = COUNTED.values(("counter", "train_steps_total", "", ()), (run, rank))
    times = COUNTED.values(("histogram", "train_step_seconds", "", SECONDS), (run,))
    last = 0.0

    def stepped(*_step: Any) -> None:
        nonlocal last
        now = time.perf_counter()
        steps[0] += 1
        if last:
            took(times, now - last)
        last = now

    if not getattr(optimizer, "_steps_are_counted", False):
        optimizer._steps_are_counted = True
        optimizer.register_step_post_hook(stepped)


def backward(tensor: torch.Tensor) -> None:
    """Compute gradients of a loss, scaled where ``accelerate(amp=True)`` needs it.

    Args:
        tensor: The loss.

    Raises:
        RuntimeError: Called outside a train loop.
    """
    scaler = _precision("torch.backward").scaler
    (tensor if scaler is None else scaler.scale(tensor)).backward()


class ScaledOptimizer(torch.optim.Optimizer):  # type: ignore[misc] # PyTorch is Any to mypy here
    """An optimizer whose gradients were scaled; otherwise the optimizer it wraps."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        # Not that of the base class: parameters and state are the wrapped optimizer's.
        self._optimizer = optimizer
        self._scaler = scaler

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling look for attributes before there is an optimizer.
        if name in ("_optimizer", "_scaler"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": self._optimizer, "_scaler": self._scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"ScaledOptimizer({self._optimizer!r})"

    def step(self, closure: Any = None) -> Any:
        """Undo the scaling and take a step, unless gradients have overflowed."""
        if closure is not None:
            raise ValueError(
                "An optimizer with accelerate(amp=True) can't step with a closure, since PyTorch "
                "can't scale what the closure computes. Call backward(loss), then step()."
            )
        result = self._scaler.step(self._optimizer)
        self._scaler.update()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)
