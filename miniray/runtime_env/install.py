"""The node's side of runtime environments: makes what a worker needs before it starts.

Decides what is needed and in which order; the folders are the cache's, archives and
virtual environments are made by ``archive`` and ``pip``. Starts no workers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any

from miniray.exceptions import RuntimeEnvSetupError
from miniray.runtime_env import archive, variables
from miniray.runtime_env.cache import FolderCache, uninterrupted
from miniray.runtime_env.pip import build_venv, venv_key, venv_python
from miniray.runtime_env.validate import DEFAULT_SETUP_TIMEOUT, PACKAGE_URI

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

#: Bytes that packages and virtual environments on a node may take before unused ones go.
DEFAULT_CACHE_LIMIT = 10 * 1024**3


@dataclasses.dataclass(frozen=True)
class WorkerEnvironment:
    """How a worker with a runtime environment is started."""

    #: Variables to set.
    env_vars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: The interpreter to run.
    python: str = sys.executable
    #: Folders to put at the front of ``sys.path``, in this order.
    sys_path: tuple[str, ...] = ()
    #: Working directory; None is the daemon's choice.
    cwd: str | None = None
    #: The worker must be a new interpreter, not a fork of the template.
    fresh_interpreter: bool = False
    #: What the worker uses of the cache; given back by ``EnvironmentManager.release``.
    cache_keys: tuple[str, ...] = ()


class EnvironmentManager:
    """Prepares the environments of a node's workers. Belongs to one event loop.

    Args:
        folder: Where packages and virtual environments are kept. Daemons of one user
            on one machine may share it.
        cache_limit: Bytes they may take before unused ones are removed.
    """

    def __init__(self, folder: Path, cache_limit: int = DEFAULT_CACHE_LIMIT) -> None:
        self._cache = FolderCache(folder, cache_limit)

    async def prepare(
        self, spec: Mapping[str, Any], fetch_blob: Callable[[str], Awaitable[bytes]]
    ) -> WorkerEnvironment:
        """Make what an environment needs on this node.

        Each package and virtual environment is made once, however many ask. When this
        is cancelled or takes too long, and nobody else waits, what runs is killed.

        Args:
            spec: A validated environment whose files were uploaded.
            fetch_blob: Returns the package of an address.

        Returns:
            How to start the worker; hand it to ``release`` when the worker has ended.

        Raises:
            RuntimeEnvSetupError: Something could not be made in time or at all.
        """
        limit = spec.get("config", {}).get("setup_timeout_seconds", DEFAULT_SETUP_TIMEOUT)
        keys: list[str] = []
        try:
            return await asyncio.wait_for(
                self._assemble(spec, fetch_blob, keys), None if limit == -1 else limit
            )
        except asyncio.TimeoutError as error:
            self._release(keys)
            raise RuntimeEnvSetupError(
                f"The runtime_env was not ready after {limit} seconds. If it needs longer, raise "
                "runtime_env['config']['setup_timeout_seconds'] (-1 is no limit)."
            ) from error
        except OSError as error:
            self._release(keys)
            raise RuntimeEnvSetupError(
                f"The node could not write the runtime_env to its cache: {error}."
            ) from error
        except BaseException:
            self._release(keys)
            raise

    def release(self, environment: WorkerEnvironment) -> None:
        """Give back what one ``prepare`` returned."""
        self._release(environment.cache_keys)

    async def close(self) -> None:
        """Stop what is being made; what is finished stays for the next daemon."""
        await self._cache.close()

    async def _assemble(
        self,
        spec: Mapping[str, Any],
        fetch_blob: Callable[[str], Awaitable[bytes]],
        keys: list[str],
    ) -> WorkerEnvironment:
        """Make all parts; ``keys`` receives what must be released."""
        env_vars = variables.expand(spec.get("env_vars", {}), os.environ)
        sys_path = [
            await self._package(uri, "py_modules", fetch_blob, keys)
            for uri in spec.get("py_modules", ())
        ]
        cwd = None
        if "working_dir" in spec:
            cwd = await self._package(spec["working_dir"], "working_dir", fetch_blob, keys)
            sys_path.append(cwd)
        python = sys.executable
        fresh = variables.needs_fresh_interpreter(env_vars)
        if "pip" in spec:
            venv = await self._venv(spec["pip"], env_vars, keys)
            python, fresh = venv_python(venv), True
            path = env_vars.get("PATH", os.environ.get("PATH", os.defpath))
            env_vars |= {"VIRTUAL_ENV": str(venv), "PATH": f"{venv / 'bin'}{os.pathsep}{path}"}
        return WorkerEnvironment(env_vars, python, tuple(sys_path), cwd, fresh, tuple(keys))

    async def _package(
        self, uri: str, key: str, fetch_blob: Callable[[str], Awaitable[bytes]], keys: list[str]
    ) -> str:
        address = PACKAGE_URI.fullmatch(uri)
        if address is None:
            raise RuntimeEnvSetupError(
                f"runtime_env[{key!r}] names {uri!r}, which was not uploaded: expected an address "
                "mrpkg://<sha256>.zip or .whl."
            )
        digest, suffix = address.groups()
        unpack = archive.unpack_wheel if suffix == ".whl" else archive.unpack

        async def build(folder: Path, _lock: int) -> None:
            content = await _fetched(uri, fetch_blob)
            if await uninterrupted(_sha256, content) != digest:
                raise RuntimeEnvSetupError(
                    f"The package {uri} arrived damaged: its content has another SHA-256."
                )
            await uninterrupted(unpack, content, folder, f"The package {uri}")

        return str(await self._acquire(f"{suffix[1:]}-{digest}", build, keys))

    async def _venv(
        self, pip: Mapping[str, Any], env_vars: Mapping[str, str], keys: list[str]
    ) -> Path:
        key = await uninterrupted(venv_key, pip, env_vars)

        async def build(folder: Path, lock: int) -> None:
            await build_venv(folder, pip, env_vars, lock)

        return await self._acquire(key, build, keys)

    async def _acquire(
        self, key: str, build: Callable[[Path, int], Awaitable[None]], keys: list[str]
    ) -> Path:
        path = await self._cache.acquire(key, build)
        keys.append(key)
        return path

    def _release(self, keys: list[str] | tuple[str, ...]) -> None:
        for key in keys:
            self._cache.release(key)


async def _fetched(uri: str, fetch_blob: Callable[[str], Awaitable[bytes]]) -> bytes:
    try:
        return await fetch_blob(uri)
    except Exception as error:
        raise RuntimeEnvSetupError(
            f"The package {uri} could not be fetched: {type(error).__name__}: {error}"
        ) from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
