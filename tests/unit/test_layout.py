"""How the code is laid out: which package may import from which, and what tests rely on."""

from __future__ import annotations

import ast
import collections
import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]

#: Lowest first: modules import from their own line and from those above it, whether at the top, in
#: a function, or for types only. The last line is everything that users import by name.
LAYERS = """
    miniray.exceptions miniray.version miniray.common
    miniray.messages
    miniray.security
    miniray.accelerators
    miniray.runtime_env
    miniray.system
    miniray.wire
    miniray.values
    miniray.objects
    miniray.calls
    miniray.logs
    miniray.engines
    miniray.profiling
    miniray.client miniray.job_config
    miniray
    miniray.worker
    miniray.head.scheduling
    miniray.head.directories
    miniray.head
    miniray.node.base
    miniray.node.relay
    miniray.node.store
    miniray.node.transfer
    miniray.node.workers
    miniray.node.objects
    miniray.node
    miniray.launch miniray.metrics
    miniray.cli miniray.__main__
    miniray.data
    miniray.train.base
    miniray.train.storage
    miniray.train.config
    miniray.train.data
    miniray.train.callbacks
    miniray.train.worker miniray.train.collective
    miniray.train.controller
    miniray.train.run
    miniray.train
    miniray.web
"""
IMPORTS = (ast.Import, ast.ImportFrom)
#: Files that a folder shows, at most.
MOST_FILES = 25


@functools.cache
def modules() -> dict[str, Path]:
    """The package's modules by name; train is a folder of its own in the repository."""
    found = {}
    for path in [*ROOT.glob("miniray/**/*.py"), *ROOT.glob("train/**/*.py")]:
        if "_proto" in path.parts or (ROOT / "miniray/train") in path.parents:
            continue
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        parts = ["miniray", *parts] if parts[0] == "train" else parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Each statement, and those within it; a twentieth of what ``ast.walk`` goes through."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, field, []))


@functools.cache
def written() -> dict[str, list[ast.stmt]]:
    """What matters here of each module: its imports, anywhere in it, and the classes at its top."""
    found = {}
    for module, path in modules().items():
        body = ast.parse(path.read_text()).body
        imports = [each for each in statements(body) if isinstance(each, IMPORTS)]
        found[module] = [*imports, *(each for each in body if isinstance(each, ast.ClassDef))]
    return found


def imported(module: str) -> Iterator[str]:
    """The modules of the package that a module imports anywhere in it."""
    known = modules()
    for node in written()[module]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known:
                    yield name
                elif node.module in known:
                    yield node.module


def layer_of(module: str, layers: dict[str, int]) -> int:
    """The layer of the longest name in LAYERS that the module's begins with."""
    while module not in layers:
        module = module.rpartition(".")[0]
    return layers[module]


def test_packages_import_only_from_those_below_them() -> None:
    layers = {n: i for i, line in enumerate(LAYERS.split("\n")) for n in line.split()}
    upwards = {
        f"{module} imports {other}"
        for module in modules()
        for other in imported(module)
        if layer_of(other, layers) > layer_of(module, layers) and module != "miniray"
    }
    assert not upwards


def test_no_modules_import_each_other_in_a_circle() -> None:
    open_ends = {module: set(imported(module)) - {module} for module in modules()}
    while True:  # what imports nothing that is left is in no circle
        free = {module for module, others in open_ends.items() if not others & open_ends.keys()}
        if not free:
            break
        for module in free:
            del open_ends[module]
    assert not open_ends


def test_a_class_name_is_of_one_class() -> None:
    classes = collections.Counter(
        node.name
        for body in written().values()
        for node in body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    # Ray has that one twice too.
    assert {name for name, count in classes.items() if count > 1} == {"RayTrainReportCallback"}


def test_a_folder_can_be_overlooked() -> None:
    folders = collections.Counter(path.parent for path in modules().values())
    large = {str(folder) for folder, count in folders.items() if count > MOST_FILES}
    assert not large


def test_no_two_test_files_have_the_same_name() -> None:
    """The second would be refused, and what workers get of the first would be looked for in it."""
    tests = Path(__file__).parents[1]
    names = collections.Counter(path.name for path in tests.rglob("*.py"))
    shared = {name for name, count in names.items() if count > 1}
    assert shared <= {"conftest.py", "__init__.py"}


def test_the_folders_of_unit_tests_are_those_of_the_package() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests/unit")
        for path in (ROOT / "tests/unit").rglob("test_*.py")
    }
    assert not {str(folder) for folder in folders if not (ROOT / "miniray" / folder).is_dir()}
