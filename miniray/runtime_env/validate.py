"""What a runtime environment may hold: checks its keys and brings them into one form.

The result holds plain data only: absolute paths or package URIs, ``pip`` always as
a dict. Keys without content are dropped. Only requirements files are read; nothing is packed or
installed here.
"""

from __future__ import annotations

import functools
import os
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.common.names import without_passwords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: How long setting up an environment may take by default, in seconds.
DEFAULT_SETUP_TIMEOUT = 600

#: A package that was uploaded: its SHA-256, and how it is unpacked.
PACKAGE_URI = re.compile(r"mrpkg://([0-9a-f]{64})(\.zip|\.whl)")

#: Ray's keys that miniray does not have, and what to do instead.
_UNSUPPORTED = {
    "conda": "use 'pip', or start the nodes inside the conda environment",
    "container": "start the nodes inside the container",
    "image_uri": "start the nodes inside the image",
    "uv": "use 'pip' with the same list of packages",
    "java_jars": "miniray runs Python only",
    "py_executable": "start the nodes with that interpreter",
    "worker_process_setup_hook": "call the hook at the start of the task or in the constructor",
    "nsight": "start the program under the profiler",
    "_nsight": "start the program under the profiler",
    "rocprof_sys": "start the program under the profiler",
    "_rocprof_sys": "start the program under the profiler",
    "mpi": "use miniray.train for groups of processes",
}

_PIP_FIELDS = ("packages", "pip_check", "pip_version", "pip_install_options")
_CONFIG_FIELDS = ("setup_timeout_seconds", "eager_install")


def validate(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Check a runtime environment and return it in its one form.

    Args:
        spec: What the user wrote. Keys that are None count as absent.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A key is not supported, or a value can't be used (a path that does
            not exist, a remote address).
    """
    if not isinstance(spec, Mapping):
        raise TypeError(f"runtime_env must be a dict or a RuntimeEnv, not {_shown(spec)}.")
    valid: dict[str, Any] = {}
    for key, value in spec.items():
        if key not in _VALIDATORS:
            raise ValueError(_unknown_key(key))
        if value is None:
            continue
        checked = _VALIDATORS[key](value)
        if checked or key == "config":
            valid[key] = checked
    return valid


def validate_config(config: Any) -> dict[str, Any]:
    """Check ``config`` and fill in its defaults."""
    if not isinstance(config, Mapping):
        raise TypeError(f"runtime_env['config'] must be a dict, not {_shown(config)}.")
    _refuse_other_fields("config", config, _CONFIG_FIELDS)
    timeout = config.get("setup_timeout_seconds", DEFAULT_SETUP_TIMEOUT)
    where = "runtime_env['config']['setup_timeout_seconds']"
    if isinstance(timeout, bool) or not isinstance(timeout, int):
        raise TypeError(f"{where} must be a whole number of seconds, not {_shown(timeout)}.")
    if timeout <= 0 and timeout != -1:
        raise ValueError(f"{where} must be above 0, or -1 for no limit, not {timeout}.")
    eager = config.get("eager_install", True)
    if not isinstance(eager, bool):
        raise TypeError(
            f"runtime_env['config']['eager_install'] must be a bool, not {_shown(eager)}."
        )
    return {"setup_timeout_seconds": timeout, "eager_install": eager}


def check_env_vars(value: Any, name: str = "runtime_env['env_vars']") -> dict[str, str]:
    """Return variables of an environment; errors as of ``validate``, with this name for them."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict of strings, not {_shown(value)}.")
    for variable, text in value.items():
        if not isinstance(variable, str) or not isinstance(text, str):
            raise TypeError(
                f"{name} must map names to strings; {variable!r} is given {_shown(text)}. Write it "
                "as a string."
            )
        if not variable or "=" in variable or "\0" in variable + text:
            raise ValueError(
                f"{name} can't hold {variable!r}: a name is not empty and has no '=', and neither "
                "name nor value has a NUL character."
            )
    return dict(value)


def _validate_working_dir(value: Any) -> str:
    path = _local_path("working_dir", value)
    if PACKAGE_URI.fullmatch(path) or Path(path).is_dir() or path.endswith(".zip"):
        return path
    raise ValueError(f"runtime_env['working_dir'] must be a folder or a .zip file, not {path!r}.")


def _validate_py_modules(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(
            "runtime_env['py_modules'] must be a list of folders, .py, .whl or .zip files, or "
            f"modules, not {_shown(value)}."
        )
    return [_validate_py_module(item) for item in value]


def _validate_py_module(item: Any) -> str:
    path = _local_path("py_modules", _module_path(item))
    suffix = Path(path).suffix
    if PACKAGE_URI.fullmatch(path) or Path(path).is_dir() or suffix in {".py", ".whl", ".zip"}:
        return path
    raise ValueError(
        "An entry of runtime_env['py_modules'] must be a folder, a .py, .whl or .zip file, or a "
        f"module written in Python, not {path!r}."
    )


def _module_path(item: Any) -> Any:
    """Return where a module's code is; anything else unchanged."""
    if not isinstance(item, types.ModuleType):
        return item
    paths = list(getattr(item, "__path__", ()))
    if len(paths) > 1:
        raise ValueError(
            f"runtime_env['py_modules'] can't take the namespace package {item.__name__!r}: it is "
            f"spread over {', '.join(paths)}. Name the folders instead."
        )
    path = paths[0] if paths else getattr(item, "__file__", None)
    if path is None:
        raise ValueError(
            f"runtime_env['py_modules'] can't take the module {item.__name__!r}: it has no file."
        )
    return path


def _local_path(key: str, value: Any) -> str:
    """Return the absolute form of an existing local path; a package URI unchanged."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"runtime_env['{key}'] takes local paths, not {_shown(value)}.")
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError(f"runtime_env['{key}'] takes paths as str, not {_shown(value)}.")
    if PACKAGE_URI.fullmatch(text):
        return text
    if "://" in text:
        raise ValueError(
            f"runtime_env['{key}'] takes local paths only, not the address "
            f"{without_passwords(text)!r}. "
            "Download it first and give its path."
        )
    path = Path(text).expanduser().absolute()
    if ".." in path.parts:
        path = path.resolve()
    if not path.exists():
        raise ValueError(f"runtime_env['{key}'] names {text!r}, but {path} does not exist.")
    return str(path)


def _validate_pip(value: Any) -> dict[str, Any]:
    fields = value if isinstance(value, Mapping) else {"packages": value}
    _refuse_other_fields("pip", fields, _PIP_FIELDS)
    if "packages" not in fields:
        raise ValueError(f"runtime_env['pip'] must have the field 'packages': {_shown(fields)}.")
    packages = _requirements(fields["packages"])
    if not packages:
        return {}
    check = fields.get("pip_check", False)
    if not isinstance(check, bool):
        raise TypeError(f"runtime_env['pip']['pip_check'] must be a bool, not {_shown(check)}.")
    valid: dict[str, Any] = {"packages": packages, "pip_check": check}
    version = fields.get("pip_version")
    if version is not None:
        if not isinstance(version, str):
            raise TypeError(
                "runtime_env['pip']['pip_version'] must be a version specifier such as "
                f"'==24.0', not {_shown(version)}."
            )
        valid["pip_version"] = version
    options = fields.get("pip_install_options")
    if options is not None:
        valid["pip_install_options"] = _strings("pip']['pip_install_options", options)
    return valid


def _requirements(packages: Any) -> list[str]:
    if isinstance(packages, (str, os.PathLike)):
        path = Path(packages).expanduser().absolute()
        if not path.is_file():
            shown = without_passwords(repr(os.fspath(packages)))
            raise ValueError(
                f"runtime_env['pip'] names the requirements file {shown}, which is not a file. "
                f"Give a list if you mean requirements: [{shown}]."
            )
        lines = read_requirements(path)
    else:
        lines = expand(_strings("pip", packages), Path.cwd())
    return list(dict.fromkeys(lines))


def _strings(key: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"runtime_env['{key}'] must be a list of strings, not {_shown(value)}.")
    for item in value:
        if not isinstance(item, str):
            raise TypeError(f"runtime_env['{key}'] must hold strings only, not {_shown(item)}.")
    return list(value)


def _refuse_other_fields(key: str, fields: Mapping[str, Any], allowed: Sequence[str]) -> None:
    other = [field for field in fields if field not in allowed]
    if other:
        raise ValueError(
            f"runtime_env['{key}'] has no field {other[0]!r}; allowed are {', '.join(allowed)}."
        )


def _unknown_key(key: object) -> str:
    allowed = ", ".join(_VALIDATORS)
    advice = _UNSUPPORTED.get(str(key))
    if advice is not None:
        return f"miniray does not support runtime_env[{key!r}]: {advice}. Supported: {allowed}."
    return f"runtime_env has no key {key!r}. Supported: {allowed}."


def _shown(value: object) -> str:
    return f"{without_passwords(repr(value)):.200} ({type(value).__name__})"


_VALIDATORS: dict[str, Callable[[Any], Any]] = {
    "env_vars": check_env_vars,
    "working_dir": _validate_working_dir,
    "py_modules": _validate_py_modules,
    "pip": _validate_pip,
    "config": validate_config,
    "excludes": functools.partial(_strings, "excludes"),
}


def merge(parent: Mapping[str, Any] | None, child: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the environment of a task or actor within that of its job or its creator.

    As in Ray, each key of the child replaces the parent's, except that ``env_vars``
    are merged variable by variable.

    Args:
        parent: Environment of the job, or of the task or actor that submits.
        child: Environment given with the task or actor.
    """
    merged = {**(parent or {}), **(child or {})}
    variables = {
        **(parent or {}).get("env_vars", {}),
        **(child or {}).get("env_vars", {}),
    }
    if variables:
        merged["env_vars"] = variables
    return merged


_NESTED = r"(?:-r\s*|--requirement(?:\s*=\s*|\s+))(?P<path>.+)"
#: Options whose value is a path relative to the file that has them ...
_FILE_OPTION = r"(?P<option>-c|--constraint|-f|--find-links)(?:\s*=\s*|\s+)(?P<path>.+)"
#: ... and to the working directory, as paths of requirements are.
_EDITABLE = r"(?P<option>-e|--editable)(?:\s*=\s*|\s+)(?P<path>.+)"
#: A comment begins at the start of a line or after a space, as in pip.
_COMMENT = r"(^|\s+)#.*$"
_ARCHIVES = (".whl", ".tar.gz", ".zip")


def read_requirements(path: Path, including: tuple[Path, ...] = ()) -> list[str]:
    """Return the requirements and options in a file, and in those it includes with ``-r``.

    Raises:
        ValueError: An included file does not exist, or files include each other.
    """
    if path in including:
        raise ValueError(f"The requirements files {path} and {including[-1]} include each other.")
    if not path.is_file():
        raise ValueError(f"The requirements file {path} does not exist.")
    lines = _logical_lines(path.read_text(encoding="utf-8"))
    return expand(lines, path.parent, (*including, path))


def expand(lines: Iterable[str], folder: Path, including: tuple[Path, ...] = ()) -> list[str]:
    """Read the files nested in requirements, and make local paths absolute.

    Args:
        lines: Requirements and options as in a requirements file.
        folder: Where the file with these lines is.
        including: The files that include each other down to this one.

    Raises:
        ValueError: An included file does not exist, or files include each other.
    """
    expanded: list[str] = []
    for line in lines:
        nested = re.fullmatch(_NESTED, line)
        if nested:
            expanded.extend(read_requirements(_absolute(nested["path"], folder), including))
        else:
            expanded.append(_absolute_line(line, folder))
    return expanded


def _logical_lines(text: str) -> list[str]:
    """Leave comments out, and join lines that end in a backslash to the next."""
    joined = re.sub(r"\\\r?\n", " ", text)
    stripped = (re.sub(_COMMENT, "", line).strip() for line in joined.splitlines())
    return [line for line in stripped if line]


def _absolute_line(line: str, folder: Path) -> str:
    for pattern, base in ((_FILE_OPTION, folder), (_EDITABLE, Path.cwd())):
        option = re.fullmatch(pattern, line)
        if option:
            value = option["path"]
            return line if "://" in value else f"{option['option']} {_absolute(value, base)}"
    path, bracket, extras = line.partition("[")
    is_path = line.startswith(("./", "../", "~/")) or (
        "://" not in line and path.endswith(_ARCHIVES)
    )
    return f"{_absolute(path, Path.cwd())}{bracket}{extras}" if is_path else line


def _absolute(path: str, base: Path) -> Path:
    return (base / Path(path.strip()).expanduser()).absolute()
