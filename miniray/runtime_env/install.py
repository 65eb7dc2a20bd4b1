"""The node's side of runtime environments: makes what a worker needs before it starts.

Packages are fetched and unpacked for each job: its files there are its own. What a ``pip``
entry lists is installed into a virtual environment, on top of the daemon's own packages; the
installer is configured as always, by its configuration files and ``PIP_*`` variables. Which folders
exist, and which jobs share them, is up to the cache. Starts no workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import signal
import site
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.exceptions import RuntimeEnvSetupError
from miniray.runtime_env.cache import FolderCache, JobFolders, uninterrupted
from miniray.runtime_env.validate import DEFAULT_SETUP_TIMEOUT, PACKAGE_URI

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

#: Bytes that virtual environments on a node may take before unused ones go.
_CACHE_LIMIT = 10 * 1024**3
#: Variables that a library reads when it is loaded, or the interpreter when it starts. A
#: worker forked from a warm template would have them too late.
_READ_AT_LOAD = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMEXPR_",
    "LD_",
    "PYTHON",
    "MALLOC_",
    "KMP_",
    "GOMP_",
    "GLIBC_TUNABLES",
    "LC_",
    "FSSPEC_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
)
_READ_AT_START = frozenset({"LANG", "TZ"})
_REFERENCE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")
#: How much of the installer's output an error shows, in bytes.
_SHOWN_OUTPUT = 4096
#: Variables that would make the new interpreter look at the daemon's own packages first.
_HIDDEN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
#: A requirement that is a local path, as the driver has made it absolute.
_LOCAL = re.compile(
    r"(?:(?:-e|--editable)\s+)?(?:[\w.\-]+(?:\[.*\])?\s*@\s*file://)?(?P<path>/[^\[;#]*)"
)


@dataclasses.dataclass
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
    #: The folders that the worker uses; given back by ``EnvironmentManager.release``.
    folders: tuple[tuple[FolderCache, str], ...] = ()


class EnvironmentManager:
    """Prepares the environments of a node's workers. Belongs to one event loop.

    Args:
        folder: Where virtual environments are kept. Daemons of one user
            on one machine may share it.
        jobs: Where the packages of this node's jobs are unpacked; this daemon's alone.
    """

    def __init__(self, folder: Path, jobs: Path) -> None:
        self._cache = FolderCache(folder, _CACHE_LIMIT)
        self._jobs = JobFolders(jobs)
        self.jobs = self._jobs.jobs
        self.end_job = self._jobs.end_job

    async def prepare(
        self,
        spec: Mapping[str, Any],
        job_id: bytes,
        fetch_blob: Callable[[str], Awaitable[bytes]],
    ) -> WorkerEnvironment:
        """Make what an environment needs on this node.

        Each package is made once per job, each virtual environment once, for all requests. When
        this is cancelled or takes too long, and no other request waits, the installer is killed.

        Args:
            spec: A validated environment whose files were uploaded.
            job_id: The job of the worker.
            fetch_blob: Returns the package of an address.

        Returns:
            How to start the worker; hand it to ``release`` when the worker has ended.

        Raises:
            RuntimeEnvSetupError: Something could not be made in time or at all.
        """
        limit = spec.get("config", {}).get("setup_timeout_seconds", DEFAULT_SETUP_TIMEOUT)
        making = _Preparation(self._cache, self._jobs, job_id, fetch_blob)
        try:
            return await asyncio.wait_for(making.assemble(spec), None if limit == -1 else limit)
        except BaseException as error:
            self._release(making.folders)
            if isinstance(error, asyncio.TimeoutError):
                raise RuntimeEnvSetupError(
                    f"The runtime_env was not ready after {limit} seconds. If it needs longer, "
                    "raise runtime_env['config']['setup_timeout_seconds'] (-1 is no limit)."
                ) from error
            if isinstance(error, OSError):
                raise RuntimeEnvSetupError(
                    f"The node could not write the runtime_env to its cache: {error}."
                ) from error
            raise

    def release(self, environment: WorkerEnvironment) -> None:
        """Give back what one ``prepare`` returned."""
        self._release(environment.folders)

    async def close(self) -> None:
        """Stop what is being made; finished folders in the cache stay for the next daemon."""
        await asyncio.gather(self._jobs.close(), self._cache.close())

    def _release(self, folders: Iterable[tuple[FolderCache, str]]) -> None:
        for cache, key in folders:
            cache.release(key)
        self._jobs.remove_unused()


@dataclasses.dataclass(eq=False, repr=False)
class _Preparation:
    """The parts of one environment, made one after the other."""

    cache: FolderCache
    jobs: JobFolders
    job_id: bytes
    fetch_blob: Callable[[str], Awaitable[bytes]]
    #: What was acquired, to be released.
    folders: list[tuple[FolderCache, str]] = dataclasses.field(default_factory=list)

    async def assemble(self, spec: Mapping[str, Any]) -> WorkerEnvironment:
        env_vars = expand(spec.get("env_vars", {}), os.environ)
        sys_path = [await self._package(uri, "py_modules") for uri in spec.get("py_modules", ())]
        cwd = None
        if "working_dir" in spec:
            cwd = await self._package(spec["working_dir"], "working_dir")
            sys_path.append(cwd)
        python = sys.executable
        fresh = needs_fresh_interpreter(env_vars)
        if "pip" in spec:
            venv = await self._venv(spec["pip"], env_vars)
            python, fresh = str(venv / "bin" / "python"), True
            path = env_vars.get("PATH", os.environ.get("PATH", os.defpath))
            env_vars |= {"VIRTUAL_ENV": str(venv), "PATH": f"{venv / 'bin'}{os.pathsep}{path}"}
        folders = tuple(self.folders)
        return WorkerEnvironment(env_vars, python, tuple(sys_path), cwd, fresh, folders)

    async def _package(self, uri: str, key: str) -> str:
        """Return the path of the job's own copy of a package."""
        address = PACKAGE_URI.fullmatch(uri)
        if address is None:
            raise RuntimeEnvSetupError(
                f"runtime_env[{key!r}] names {uri!r}, which was not uploaded: expected an address "
                "mrpkg://<sha256>.zip or .whl."
            )
        from miniray.runtime_env import packages

        digest, suffix = address.groups()
        unpack = packages.unpack_wheel if suffix == ".whl" else packages.unpack

        async def build(folder: Path, _lock: int) -> None:
            content = await _fetched(uri, self.fetch_blob)
            if await uninterrupted(_sha256, content) != digest:
                raise RuntimeEnvSetupError(
                    f"The package {uri} arrived damaged: its content has another SHA-256."
                )
            await uninterrupted(unpack, content, folder, f"The package {uri}")

        job = self.jobs.of(self.job_id)
        return str(await self._acquire(job, f"{suffix[1:]}-{digest[:32]}", build))

    async def _venv(self, pip: Mapping[str, Any], env_vars: Mapping[str, str]) -> Path:
        async def build(folder: Path, lock: int) -> None:
            await build_venv(folder, pip, env_vars, lock)

        key = await uninterrupted(venv_key, pip, env_vars)
        return await self._acquire(self.cache, key, build)

    async def _acquire(
        self, cache: FolderCache, key: str, build: Callable[[Path, int], Awaitable[None]]
    ) -> Path:
        path = await cache.acquire(key, build)
        self.folders.append((cache, key))
        return path


async def _fetched(uri: str, fetch_blob: Callable[[str], Awaitable[bytes]]) -> bytes:
    try:
        return await fetch_blob(uri)
    except Exception as error:
        raise RuntimeEnvSetupError(
            f"The package {uri} could not be fetched: {type(error).__name__}: {error}"
        ) from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def needs_fresh_interpreter(env_vars: Mapping[str, str]) -> bool:
    """Return whether a variable must be set before the interpreter starts to have its effect."""
    return any(name.startswith(_READ_AT_LOAD) or name in _READ_AT_START for name in env_vars)


def expand(env_vars: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Replace ``${NAME}`` and ``$NAME`` in values, as Ray does.

    Args:
        env_vars: The variables of a runtime environment.
        environ: The node's own variables, which references stand for. An unknown
            ``${NAME}`` becomes empty; an unknown ``$NAME`` stays.
    """

    def value(reference: re.Match[str]) -> str:
        plain, braced = reference.groups()
        if plain is not None:
            return environ.get(plain, reference[0])
        return environ.get(braced, "")

    return {name: _REFERENCE.sub(value, text) for name, text in env_vars.items()}


# --- virtual environments ---------------------------------------------------------------


def venv_key(pip: Mapping[str, Any], env_vars: Mapping[str, str]) -> str:
    """Return a file name that two virtual environments share when they are the same.

    Local files and folders count with their content of this moment, and so do the
    installer's settings and this interpreter.

    Args:
        pip: The ``pip`` entry of a validated environment.
        env_vars: The variables of the environment.
    """
    identity = {
        "pip": dict(pip),
        "settings": {name: env_vars[name] for name in sorted(env_vars) if name.startswith("PIP_")},
        "local": [_fingerprint(line) for line in pip["packages"]],
        "interpreter": [sys.executable, sys.version, _inherited_folders()],
    }
    text = json.dumps(identity, sort_keys=True)
    return f"venv-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


async def build_venv(
    folder: Path, pip: Mapping[str, Any], env_vars: Mapping[str, str], lock: int
) -> None:
    """Make a virtual environment and install into it.

    When cancelled, the installer and its children are killed before this returns.

    Args:
        folder: An empty folder, at its final place: scripts hold its path.
        pip: The ``pip`` entry of a validated environment.
        env_vars: Variables for the installer, above the daemon's own.
        lock: A descriptor that the installer inherits, so that the lock is held while the installer
            runs, even if this process ends.

    Raises:
        RuntimeEnvSetupError: The installer failed; the message ends in its output.
    """
    environ = {name: text for name, text in os.environ.items() if name not in _HIDDEN_VARIABLES}
    # Here, so that what an installer leaves that is killed goes with the folder.
    temporary = folder / "tmp"
    temporary.mkdir()
    environ |= {"TMPDIR": str(temporary), **env_vars}
    environ |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    asked = ", ".join(pip["packages"])

    async def run(*command: str) -> None:
        await _run(command, asked, folder, environ, lock)

    python = str(folder / "bin" / "python")
    await run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder))
    await uninterrupted(_inherit, folder)
    if importlib.util.find_spec("pip") is None:
        await run(python, "-m", "ensurepip")
    install = (python, "-m", "pip", "install")
    if "pip_version" in pip:
        await run(*install, f"pip{pip['pip_version']}")
    requirements = temporary / "requirements.txt"  # there may be passwords in it
    requirements.write_text("".join(f"{line}\n" for line in pip["packages"]), encoding="utf-8")
    await run(*install, "-r", str(requirements), *pip.get("pip_install_options", ()))
    if pip["pip_check"]:
        await run(python, "-m", "pip", "check")
    await uninterrupted(shutil.rmtree, temporary)


async def _run(
    command: Sequence[str], asked: str, folder: Path, environ: Mapping[str, str], lock: int
) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env=dict(environ),
        start_new_session=True,  # so that the installer's children can be killed with it
        pass_fds=(lock,),
    )
    assert process.stdout is not None
    tail = b""
    try:
        while chunk := await process.stdout.read(65536):
            tail = (tail + chunk)[-_SHOWN_OUTPUT:]
        status = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    if status != 0:
        raise RuntimeEnvSetupError(
            f"The virtual environment for pip packages {asked} could not be made: "
            f"`{shlex.join(command)}` ended with status {status}. The end of its output:\n"
            f"{tail.decode(errors='replace').strip()}"
        )


def _inherit(folder: Path) -> None:
    """Let the environment see the packages of this process's interpreter.

    ``--system-site-packages`` gives those of the base interpreter only, which are not
    this process's when it runs in a virtual environment itself. ``addsitedir`` and not a
    plain path, so that editable installs there are found.
    """
    library = f"python{sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _inherited_folders()]
    target = folder / "lib" / library / "site-packages" / "_miniray_inherited.pth"
    target.write_text("".join(lines), encoding="utf-8")


def _inherited_folders() -> list[str]:
    """Return folders of packages that a virtual environment would not see by itself."""
    in_venv = sys.prefix != sys.base_prefix
    folders = site.getsitepackages() if in_venv else []
    home = str(Path(__file__).parents[2])  # where miniray is
    return list(dict.fromkeys([*folders, home]))


def _fingerprint(requirement: str) -> object:
    """Return what a requirement that is a local path holds now; None for any other."""
    local = _LOCAL.fullmatch(requirement)
    if local is None:
        return None
    path = Path(local["path"].strip())
    if path.is_dir():
        from miniray.runtime_env.scan import scan

        return [(member.name, member.size, member.mtime_ns) for member in scan(path)]
    if path.is_file():
        status = path.stat()
        return [status.st_size, status.st_mtime_ns]
    return None
