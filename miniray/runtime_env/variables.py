"""Environment variables of a runtime environment: their values, and when they are read.

Pure: sets nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
)
_READ_AT_START = frozenset({"LANG", "TZ"})
_REFERENCE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")


def needs_fresh_interpreter(env_vars: Mapping[str, str]) -> bool:
    """Whether a variable must be set before the interpreter starts to have its effect."""
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
