"""``ray_names.txt``: every name is there, and so is the test that shows its behaviour."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import operator
import re
from pathlib import Path
from typing import Any

import pytest

import miniray

TESTS = Path(__file__).resolve().parent.parent

#: Name and test of each line.
NAMES = [
    (name, test)
    for line in (TESTS / "ray_names.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for name, test in [line.split()]
]


#: Modules of the train layer with public names. What is one of `train` itself is listed as that.
TRAIN = ("callbacks", "collective", "data", "huggingface.transformers", "jax", "lightning", "torch")

#: How a program writes the methods that it does not call by their names.
WRITTEN = {"__anext__": "async for", "__await__": "await", "__eq__": "==", "__hash__": "hash"}


@functools.cache
def text_of(file: str) -> str:
    """The text of a module of tests."""
    return (TESTS / file if "/" in file else TESTS / "cluster" / file).read_text()


@functools.cache
def functions_of(file: str) -> set[str]:
    """Names of the test functions of a module, without importing it."""
    tree = ast.parse(text_of(file))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def exported_by(module: str) -> set[str]:
    """``__all__`` of a module below the package, without importing what the module needs."""
    path = Path(miniray.__file__).parent.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def name_param(name: str) -> Any:
    """A name as a parameter; slow tests have the libraries that some modules need."""
    needs = ("train.lightning.", "train.huggingface.")
    return pytest.param(name, marks=[pytest.mark.slow] if name.startswith(needs) else [])


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


@pytest.mark.parametrize("name", [name_param(name) for name, _ in NAMES if ":" not in name])
def test_the_name_is_in_the_package(name: str) -> None:
    assert resolve(name) is not None


@pytest.mark.parametrize(("name", "test"), NAMES)
def test_the_test_exists_and_its_file_has_the_name(name: str, test: str) -> None:
    file, _, function = test.partition("::")
    assert function in functions_of(file), f"{name} is said to be shown by {test}"
    last = re.split(r"[.:]", name)[-1]
    written = re.escape(WRITTEN.get(last, last))
    assert re.search(rf"(?<!\w){written}(?!\w)", text_of(file)), f"{file} does not have {last}"


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
    listed = {name.split(".")[0] for name, _ in NAMES}
    listed |= {name.removeprefix("actor.") for name, _ in NAMES if name.startswith("actor.")}
    modules_and_types = {"ActorMethod", "__version__", "data", "exceptions", "runtime_env", "train"}
    assert set(miniray.__all__) - modules_and_types <= listed


def test_every_argument_of_the_functions_is_listed() -> None:
    #: What names the thing itself, as the first argument of each but `init`, is shown by its name.
    things = {"object_refs", "ray_waitables", "ray_waitable", "value", "actor", "name"}
    told = {
        f"{function}.{name}"
        for function in ("init", "get", "put", "wait", "kill", "cancel", "get_actor")
        for name, parameter in inspect.signature(getattr(miniray, function)).parameters.items()
        if name not in things and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    among_keywords = {"init._memory", "init._temp_dir"}
    assert names_of("argument:") == told | among_keywords


def test_every_error_is_listed() -> None:
    listed = names_of("exceptions.")
    assert exported_by("exceptions") == listed
    for name in listed - {"DeathCause"}:
        assert issubclass(resolve(f"exceptions.{name}"), Exception)


def test_every_method_that_is_in_every_actor_is_listed() -> None:
    from miniray.worker.work import BUILT_IN, SHUTDOWN

    assert names_of("method:") == {*BUILT_IN, *SHUTDOWN}


def test_every_name_of_the_train_layer_is_listed() -> None:
    own = exported_by("train")
    public = set(own)
    for module in TRAIN:
        public |= {f"{module}.{name}" for name in exported_by(f"train.{module}") - own}
    assert names_of("train.") == public


def test_completion_shows_public_names_only() -> None:
    for module in (miniray, miniray.util):
        shown = set(dir(module))
        assert set(module.__all__) <= shown
        assert not shown & {"TYPE_CHECKING", "absent", "annotations", "importlib", "tell_imports"}
        assert all(getattr(module, name) is not None for name in shown)
