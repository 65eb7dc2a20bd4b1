"""Builds miniray; the only step beyond setuptools is making the gRPC code from ``proto/``.

The generated code lives in ``miniray/_proto`` and is not committed. Everything
else about the package is said in ``pyproject.toml``.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PROTO = ROOT / "proto"
GENERATED = ROOT / "miniray" / "_proto"
_PACKAGE = "miniray._proto"


def generate() -> None:
    """Compile every file of ``proto/`` into ``miniray/_proto``."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        made = Path(folder)
        _compile(made)
        # protoc writes absolute imports of sibling modules; they live in a package here.
        for module in made.glob("*_pb2*.py*"):
            text = re.sub(r"^import (\w+_pb2)", r"from . import \1", module.read_text(), flags=re.M)
            module.write_text(text)
        (made / "__init__.py").write_text('"""Code generated from proto/ by setup.py."""\n')
        GENERATED.mkdir(exist_ok=True)
        for module in made.iterdir():  # whole, as programs may import them meanwhile
            module.replace(GENERATED / module.name)


def _compile(made: Path) -> None:
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    files = sorted(PROTO.glob("miniray/v1/*.proto"))
    base = PROTO / "miniray" / "v1"
    code = protoc.main(
        [
            "protoc",
            f"-I{base}",
            f"-I{well_known}",
            f"--python_out={made}",
            f"--pyi_out={made}",
            f"--grpc_python_out={made}",
            *(file.name for file in files),
        ]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with exit code {code} on {PROTO}")


class BuildWithProto(build_py):
    """``build_py`` that makes the generated code first."""

    def run(self) -> None:
        generate()
        # In a fresh clone it was not there yet when the packages were looked for.
        if _PACKAGE not in self.packages:
            self.packages.append(_PACKAGE)
        super().run()


setup(cmdclass={"build_py": BuildWithProto})
