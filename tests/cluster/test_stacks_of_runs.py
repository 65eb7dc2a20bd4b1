"""`miniray stack` and `miniray profile` of a training run: all ranks at once, or one."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import takes_less_than, wait_until

from miniray.client.command_connection import CommandConnection, connect_for_cli
from miniray.profiling.looks import look, profile
from miniray.profiling.targets import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.engine("miniray")]


@pytest.fixture
def connection() -> Iterator[CommandConnection]:
    connection = connect_for_cli(None, "--address", None)
    yield connection
    connection.close()


@pytest.fixture
def run(fit: Callable[..., Any], tmp_path: Path) -> Iterator[str]:
    """The name of a run whose two ranks compute until the test is over."""
    end = tmp_path / "end"

    def loop(config: dict[str, str]) -> None:
        import os

        from miniray.train import get_context

        def computes() -> None:
            while not os.path.exists(config["end"]):
                sum(range(1000))

        open(f"{config['end']}-{get_context().get_world_rank()}", "w").close()
        computes()

    thread = threading.Thread(target=fit, args=(loop, {"end": str(end)}), kwargs={"name": "seen"})
    thread.start()
    wait_until(lambda: len(list(tmp_path.glob("end-*"))) == 2, timeout=60)
    yield "seen"
    end.touch()
    thread.join()


def complete(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Ask until all processes have answered in time, as they do where others let them run."""
    told: list[dict[str, Any]] = []

    def all_have_answered() -> bool:
        told.append(ask())
        return not told[-1]["notes"]

    wait_until(all_have_answered, timeout=60, told=lambda: told[-1]["notes"])
    return told[-1]


def test_ranks_show_what_they_do_and_equal_stacks_are_one(
    connection: CommandConnection, run: str
) -> None:
    found = complete(lambda: look(connection, run))
    assert {who for group in found["groups"] for who in group["who"]} == {"rank 0", "rank 1"}
    assert all("loop" in group["stack"][0] for group in found["groups"])

    def look_at_one() -> float:
        began = time.monotonic()
        looked = look(connection, run, rank=1)
        took = time.monotonic() - began
        assert [group["who"] for group in looked["groups"]] == [["MainThread"]] or looked["notes"]
        return took

    takes_less_than(1, look_at_one)
    with pytest.raises(TargetError, match="seen has no rank 2"):
        look(connection, run, rank=2)


def test_a_profile_of_a_run_has_a_branch_for_each_rank(
    connection: CommandConnection, run: str
) -> None:
    found = complete(lambda: profile(connection, "cpu", run, 1.0))
    assert {each["name"] for each in found["tree"]["children"]} == {"rank 0", "rank 1"}
    found = complete(lambda: profile(connection, "cpu", run, 1.0, rank=0))
    names = [child["name"] for child in found["tree"]["children"]]
    # A sample may meet another thread of the process.
    assert any("loop" in name for name in names)
    assert not {"rank 0", "rank 1"} & set(names)
