"""What holds for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# No test may attach to the cluster of whoever runs it, or run with the tunables of that shell.
# Here, as what is first read of them stays; processes that tests start inherit the rest.
for _name in [name for name in os.environ if name.startswith("MINIRAY_")]:
    del os.environ[_name]

# Some tests fork while gRPC, which others of the same process use, has threads. No process that
# runs user code imports gRPC, so its fork handlers, which end such a child, are out of place.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# On a machine that does other things too, any example may take longer than any time. Whether a
# change is good is not to depend on luck: other examples, and more, are for the slow tests.
hypothesis.settings.register_profile("miniray", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("slow", deadline=None, max_examples=200)
hypothesis.settings.load_profile("miniray")


#: Tests that have another outcome on Ray, by its own choice: `id: reason`.
RAY_DIFFERS = Path(__file__).parent / "engines" / "ray.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", default="miniray", choices=["miniray", "ray"])


def pytest_configure(config: pytest.Config) -> None:
    """Before any property is loaded, look for new examples if slow tests are wanted."""
    if config.option.markexpr != "not slow":
        hypothesis.settings.load_profile("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another engine, leave out what looks at miniray's inside, and expect what differs."""
    engine = config.getoption("engine")
    for item in items:
        own = item.get_closest_marker("engine")
        if own is not None and engine not in own.args:
            item.add_marker(pytest.mark.skip(reason=f"looks at the engine {own.args[0]}"))
    if engine == "miniray":
        return
    os.environ["MINIRAY_ENGINE"] = engine  # no test that makes its own cluster gets miniray's
    lines = [line for line in RAY_DIFFERS.read_text().splitlines() if line and line[0] != "#"]
    reasons = dict(line.split(": ", 1) for line in lines)
    for item in items:
        name = item.nodeid.removeprefix("tests/cluster/")
        if name in reasons:  # one that passes fails the run: its line has to go
            item.add_marker(pytest.mark.xfail(reason=reasons[name], strict=True))
        elif f"- {name}" in reasons:
            item.add_marker(pytest.mark.skip(reason=reasons[f"- {name}"]))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection() -> None:
    """Look for no garbage among what is collected: nearly all of it lives as long as all tests."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Spare the garbage collector, which many tests call, what lives as long as all tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def own_tunables() -> Iterator[None]:
    """Let no module go on with tunables that another one's environment had."""
    yield
    from miniray.common.config import config

    config.cache_clear()
