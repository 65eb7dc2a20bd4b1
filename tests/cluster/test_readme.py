"""The documents tell the truth: code in them runs, and what they name is there."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docs/data.md",
    "docs/observe.md",
    "docs/roadmap.md",
    "docs/ray_engine.md",
)
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.M | re.S)
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:json|md|proto|py|pyi|toml|txt|yaml)))`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[\w-]+)?\)")
#: ``Connection.post`` (``wire/connection.py``): something, and the file that defines it.
_DEFINITION = re.compile(r"`([A-Za-z_][\w.]*)`\s+\(`([\w/]+\.py)`\)")


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(language: str, document: str = "README.md") -> list[str]:
    found = _BLOCK.findall(text_of(document))
    return [textwrap.dedent(block) for _, kind, block in found if kind == language]


def locate(path: str) -> Path:
    """A file as the documents name it: from the root, or from the package."""
    return next((base / path for base in (ROOT, ROOT / "miniray") if (base / path).exists()), ROOT)


def lines(text: str) -> str:
    """Without indentation, so that part of a function can be shown by itself."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def of_users(language: str) -> list[str]:
    """Return the blocks of the documents whose code is to be tried."""
    return [
        each for document in ("README.md", "docs/data.md") for each in blocks(language, document)
    ]


PROGRAMS = [block for block in of_users("python") if block.startswith("import miniray\n")]
PARTS = [block for block in of_users("python") if block not in PROGRAMS]


def test_there_is_code_in_the_readme() -> None:
    assert PROGRAMS
    assert PARTS
    assert blocks("sh")


@pytest.mark.parametrize(("program", "output"), [*zip(PROGRAMS, of_users("text"), strict=True)])
def test_a_whole_program_prints_what_its_document_says(
    program: str, output: str, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    # Not tmp_path: a socket's path has at most 107 bytes.
    base = tempfile.mkdtemp(prefix="mr-test-", dir="/tmp")
    environment = {**os.environ, "MINIRAY_TMPDIR": base, "PYTHONPATH": str(ROOT)}
    try:
        result = subprocess.run(
            [sys.executable, file],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert (result.stdout, result.stderr) == (output, "")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_program_is_in_an_example(part: str) -> None:
    examples = [lines(path.read_text()) for path in (ROOT / "examples").glob("*.py")]
    assert any(lines(part) in example for example in examples), part


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_can_be_given_as_they_are_written(document: str) -> None:
    from miniray.cli.main import main

    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.M))
    for line in "\n".join(blocks("sh", document)).splitlines():
        command, *words = shlex.split(line, comments=True) or [""]
        if command == "make":
            assert {word for word in words if re.fullmatch(r"[\w-]+", word)} <= targets, line
        elif command == "miniray":
            found, given = main.get_command(click.Context(main), words[0]), words
            while isinstance(found, click.Group):  # `miniray slurm script`
                found, given = found.commands[given[1]], given[1:]
            own = given[: given.index("--")] if "--" in given else given
            known = {option for param in found.params for option in param.opts}
            assert {word for word in own if word.startswith("-")} <= known, line
        scripts = [word for word in words if word.endswith(".py")]
        assert all((ROOT / script).is_file() for script in scripts), line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_files_that_a_document_names_exist(document: str) -> None:
    text = text_of(document)
    named = {*_PATH.findall(text), *_LINK.findall(text)}
    assert named or document == "CHANGELOG.md"
    missing = sorted(path for path in named if locate(path) == ROOT)
    assert not missing, f"{document} names what is not there: {missing}"


def defined_in(path: Path) -> set[str]:
    """Functions and classes of a file, methods as ``Class.method``."""
    names = set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.parse(path.read_text()).body:
        parts = [node, *getattr(node, "body", [])] if isinstance(node, ast.If) else [node]
        for part in parts:
            if isinstance(part, kinds):
                names.add(part.name)
            if isinstance(part, ast.ClassDef):
                inner = [n for n in ast.walk(part) if isinstance(n, kinds)]
                names.update(f"{part.name}.{each.name}" for each in inner)
    return names


DEFINITIONS = sorted(
    {found for document in DOCUMENTS for found in _DEFINITION.findall(text_of(document))}
)


@pytest.mark.parametrize(("name", "path"), DEFINITIONS)
def test_what_a_document_places_in_a_file_is_defined_there(name: str, path: str) -> None:
    file = locate(path)
    assert file.is_file(), f"{path} is not there"
    assert name in defined_in(file), f"{path} does not define {name}"
