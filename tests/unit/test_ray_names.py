"""``ray_names.txt``: every name is there, and so is the test that shows its behaviour."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import operator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent

#: Name and test of each line.
NAMES = [
    (name, test)
    for line in (TESTS / "ray_names.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for name, test in [line.split()]
]


@functools.cache
def functions_of(file: str) -> set[str]:
    """Names of the test functions of a module of behaviour tests, without importing it."""
    tree = ast.parse((TESTS / "cluster" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def resolve(path: str) -> Any:
    """What ``from miniray.<modules> import <name>`` gives for ``<modules>.<name>``.

    Modules come first: ``miniray.util.placement_group`` is a module and a function.
    """
    found: Any = importlib.import_module("miniray")
    rest = path.split(".")
    while hasattr(found, "__path__") and importlib.util.find_spec(f"{found.__name__}.{rest[0]}"):
        found = importlib.import_module(f"{found.__name__}.{rest.pop(0)}")
    return operator.attrgetter(".".join(rest))(found)


def names_of(kind: str) -> set[str]:
    return {name.removeprefix(kind) for name, _ in NAMES if name.startswith(kind)}


def test_no_name_is_listed_twice() -> None:
    names = [name for name, _ in NAMES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", [name for name, _ in NAMES if ":" not in name])
def test_the_name_is_in_the_package(name: str) -> None:
    assert resolve(name) is not None


@pytest.mark.parametrize(("name", "test"), NAMES)
def test_the_test_exists(name: str, test: str) -> None:
    file, _, function = test.partition("::")
    assert function in functions_of(file), f"{name} is said to be shown by {test}"


def test_every_option_is_listed() -> None:
    from miniray.options import ACTOR_OPTIONS, METHOD_OPTIONS, TASK_OPTIONS

    without_effect = {
        "_labels",
        "_metadata",
        "allow_out_of_order_execution",
        "enable_task_events",
        "object_store_memory",
    }
    of_miniray_alone = {"_preload", "_preload_later"}
    known = {*TASK_OPTIONS, *ACTOR_OPTIONS, *METHOD_OPTIONS}
    assert names_of("option:") == known - without_effect - of_miniray_alone


def test_every_exported_name_is_listed() -> None:
    import miniray

    listed = {name.split(".")[0] for name, _ in NAMES}
    listed |= {name.removeprefix("actor.") for name, _ in NAMES if name.startswith("actor.")}
    modules_and_types = {"ActorMethod", "__version__", "exceptions", "runtime_env", "train"}
    assert set(miniray.__all__) - modules_and_types <= listed


def test_every_argument_of_the_functions_is_listed() -> None:
    import miniray

    #: What names the thing itself, as the first argument of each but `init`, is shown by its name.
    things = {"object_refs", "ray_waitables", "ray_waitable", "value", "actor", "name"}
    told = {
        f"{function}.{name}"
        for function in ("init", "get", "put", "wait", "kill", "cancel", "get_actor")
        for name, parameter in inspect.signature(getattr(miniray, function)).parameters.items()
        if name not in things and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert names_of("argument:") == told


def test_every_error_of_ray_is_listed() -> None:

    listed = {name.removeprefix("exceptions.") for name, _ in NAMES if "exceptions." in name}
    for name in listed:
        assert issubclass(resolve(f"exceptions.{name}"), Exception)
    # Names of miniray's own, besides: each is Ray's under another name, or of no call's.
    own = {"ActorError", "DeathCause", "MinirayError", "NotInitializedError", "TaskError"}
    own |= {"PendingCallsLimitExceededError", "PlacementGroupRemovedError", "VersionMismatchError"}
    assert set(importlib.import_module("miniray.exceptions").__all__) == listed | own
