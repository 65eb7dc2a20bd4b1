"""Graphs of tasks and actors that ``bind`` makes."""

from __future__ import annotations

from typing import Any

import pytest

import miniray
from miniray.dag import (
    ClassMethodNode,
    ClassNode,
    DAGNode,
    FunctionNode,
    InputAttributeNode,
    InputNode,
    MultiOutputNode,
)

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
def add(a: int, b: int = 1) -> int:
    return a + b


@miniray.remote
def total(values: list[Any]) -> Any:
    return sum(miniray.get(values))


@miniray.remote
class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def inc(self, amount: int) -> None:
        self.value += amount

    def get(self) -> int:
        return self.value


def test_nodes_are_arguments_of_others() -> None:
    first = add.bind(1, b=2)
    second = add.bind(first, b=3)
    assert miniray.get(add.bind(second, b=first).execute()) == 9
    assert miniray.get(total.bind([first, second]).execute()) == 9


def test_a_node_runs_once_in_an_execution() -> None:
    first = add.bind(1)
    refs = MultiOutputNode([first, first]).execute()
    assert refs[0] is refs[1]
    assert first.execute() != first.execute()


def test_calls_of_an_actor_that_were_bound_before_run_before() -> None:
    one, two = Counter.bind(10), Counter.bind(10)
    one.inc.bind(2)
    one.inc.bind(4)
    two.inc.bind(6)
    graph = add.bind(one.get.bind(), two.get.bind())
    assert [miniray.get(graph.execute()) for _ in range(2)] == [32, 32]


def test_methods_of_an_actor_that_lives_can_be_bound() -> None:
    counter = Counter.remote(0)
    graph = counter.inc.options(num_returns=1).bind(2)
    for _ in range(3):
        miniray.get(graph.execute())
    assert miniray.get(counter.get.remote()) == 6


def test_an_input_is_given_when_the_graph_runs() -> None:
    with InputNode() as given:
        graph = add.bind(add.bind(given), given)
    assert [miniray.get(graph.execute(n)) for n in (2, 3)] == [5, 7]


def test_parts_of_an_input_can_be_read() -> None:
    with InputNode() as given:
        by_key = MultiOutputNode([add.bind(given["x"]), add.bind(given["y"])])
        several = add.bind(given[0], given.b)
    assert miniray.get(by_key.execute({"x": 1, "y": 2})) == [2, 3]
    assert miniray.get(several.execute(1, b=5)) == 6
    with pytest.raises(TypeError, match="was not given 'b'"):
        several.execute(1, c=5)


def test_each_kind_of_call_has_its_kind_of_node() -> None:
    actor = Counter.bind(1)
    assert type(add.bind(1)) is FunctionNode
    assert type(actor) is ClassNode
    assert type(actor.get.bind()) is type(Counter.remote(1).get.bind()) is ClassMethodNode
    assert type(InputNode().name) is InputAttributeNode
    assert issubclass(MultiOutputNode, DAGNode)


def test_executing_a_class_gives_a_handle() -> None:
    handle = Counter.bind(7).execute()
    assert miniray.get(handle.get.remote()) == 7


def test_a_graph_cannot_be_compiled() -> None:
    with pytest.raises(AttributeError, match="no compiled graphs"):
        add.bind(1).experimental_compile()  # type: ignore[attr-defined]


def test_a_method_that_is_not_there_cannot_be_bound() -> None:
    with pytest.raises(AttributeError, match="'dec'"):
        Counter.bind(1).dec  # noqa: B018


def test_a_graph_with_an_actor_can_be_passed_on() -> None:
    @miniray.remote
    def run(graph: DAGNode) -> Any:
        return miniray.get(graph.execute())

    counter = Counter.bind(1)
    counter.inc.bind(2)
    assert miniray.get(run.remote(counter.get.bind())) == 3
