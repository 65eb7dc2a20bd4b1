"""``get_runtime_context`` and ``get_gpu_ids`` tell what the runtime knows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from fake_runtime import NODE, FakeRuntime, fake_runtime

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    with fake_runtime() as fake:
        yield fake


def test_a_driver_has_a_job_and_a_node_but_no_task(runtime: FakeRuntime) -> None:
    context = miniray.get_runtime_context()

    assert context.get() == {"job_id": "job", "node_id": NODE, "namespace": "ns"}
    assert context.get_worker_id() == "worker"
    assert context.get_task_id() is None
    assert context.get_actor_id() is None
    assert context.get_actor_name() is None
    assert context.get_placement_group_id() is None
    assert context.gcs_address == "127.0.0.1:1"
    assert context.get_session_name() == "s1"
    assert context.get_node_labels() == {"zone": "a"}
    with pytest.raises(RuntimeError, match="driver"):
        context.get_assigned_resources()
    with pytest.raises(RuntimeError, match="not a driver"):
        context.is_canceled()
    with pytest.raises(RuntimeError, match="methods of an actor"):
        context.current_actor  # noqa: B018


def test_one_context_tells_of_each_task_anew(runtime: FakeRuntime) -> None:
    context = miniray.get_runtime_context()
    runtime.facts = dataclasses.replace(
        runtime.facts,
        task_id="t1",
        task_name="mine",
        task_function_name="work",
        placement_group_id=b"\x01",
        should_capture_child_tasks_in_placement_group=True,
        assigned_resources={"CPU": 2.0},
        accelerator_ids={"GPU": ["1"], "TPU": []},
        runtime_env={"env_vars": {"A": "b"}},
    )

    assert context.get()["task_id"] == "t1"
    assert context.get_task_name() == "mine"
    assert not context.is_canceled()
    assert context.get_task_function_name() == "work"
    assert context.get_placement_group_id() == "01"
    assert context.should_capture_child_tasks_in_placement_group
    assert context.get_assigned_resources() == {"CPU": 2.0}
    assert context.get_accelerator_ids() == {"GPU": ["1"], "TPU": []}
    assert context.get_runtime_env_string() == '{"env_vars": {"A": "b"}}'


@pytest.mark.parametrize(
    ("ids", "expected"), [(["0", "3"], [0, 3]), ([], []), (["GPU-1a"], ["GPU-1a"])]
)
def test_gpu_ids_are_numbers_where_they_can_be(
    runtime: FakeRuntime, ids: list[str], expected: list[int | str]
) -> None:
    runtime.facts = dataclasses.replace(runtime.facts, accelerator_ids={"GPU": ids})

    assert miniray.get_gpu_ids() == expected
