"""Which engine runs a program: miniray's own cluster, or an existing one of Ray.

A process chooses once, in ``init()``; its workers have the same engine. An engine implements the
interface ``Runtime`` (``common/runtime.py``) in a package of its own, imported when it is chosen.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.common.runtime import Runtime

#: Environment variable that names the engine, where ``init()`` does not.
ENGINE_VARIABLE = "MINIRAY_ENGINE"
ENGINES = ("miniray", "ray")

_chosen: str | None = None


def engine_of(engine: str | None, address: str | None) -> str:
    """Return the engine that ``init()`` selects.

    Args:
        engine: As given, or None.
        address: An address that begins with ``ray://`` selects Ray.

    Raises:
        ValueError: There is no such engine, or it is not that of the address.
    """
    name = engine or os.environ.get(ENGINE_VARIABLE)
    if name is not None and name not in ENGINES:
        where = "engine" if engine else ENGINE_VARIABLE
        raise ValueError(f"{where} must be one of {', '.join(ENGINES)}, not {name!r}.")
    if address is not None and address.startswith("ray://"):
        if engine not in (None, "ray"):
            raise ValueError(f"address={address!r} is Ray's: leave out engine={engine!r}.")
        return "ray"
    return name or "miniray"


def choose(engine: str) -> None:
    """Settle on an engine for the rest of this process.

    Raises:
        RuntimeError: It has used another one: functions and classes would belong to both.
    """
    global _chosen
    if _chosen not in (None, engine):
        raise RuntimeError(
            f"This process has used the engine {_chosen!r} and can't change to {engine!r}: start "
            f"another process."
        )
    _chosen = engine


def refuse_on_ray(capability: str) -> None:
    """Raise EngineError if Ray is the engine of this process, or of the environment."""
    if (_chosen or engine_of(None, None)) == "ray":
        from miniray.engines.capabilities import refuse

        refuse(capability)


def start_ray(options: Any) -> tuple[Runtime, dict[str, Any]]:
    """Attach this process to a Ray cluster.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no cluster at the address.
    """
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise  # it is installed, but something else is not
        raise ImportError(
            "The engine 'ray' needs Ray, in the version of the cluster: "
            "pip install 'miniray[ray]' 'ray==VERSION'."
        ) from None
    from miniray.engines.ray.runtime import connect_to_ray

    return connect_to_ray(options)
