"""Virtual environments with what a ``pip`` entry lists, on top of the daemon's own packages.

The installer is configured as always: by its configuration files and ``PIP_*``
variables. Caching and sharing of the environments is the cache's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
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
from miniray.runtime_env.cache import uninterrupted
from miniray.runtime_env.scan import scan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: How much of the installer's output an error shows, in bytes.
_SHOWN_OUTPUT = 4096
#: Variables that would make the new interpreter look at the daemon's own packages first.
_HIDDEN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
#: A requirement that is a local path, as the driver has made it absolute.
_LOCAL = re.compile(
    r"(?:(?:-e|--editable)\s+)?(?:[\w.\-]+(?:\[.*\])?\s*@\s*file://)?(?P<path>/[^\[;#]*)"
)


def venv_key(pip: Mapping[str, Any], env_vars: Mapping[str, str]) -> str:
    """Return a file name that two virtual environments share when they are the same.

    Local files and folders count with what they hold at this moment, and so do the
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
        lock: A descriptor that the installer inherits, so that what it locks stays
            locked while the installer runs, whatever happens to this process.

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
        return [(member.name, member.size, member.mtime_ns) for member in scan(path)]
    if path.is_file():
        status = path.stat()
        return [status.st_size, status.st_mtime_ns]
    return None
