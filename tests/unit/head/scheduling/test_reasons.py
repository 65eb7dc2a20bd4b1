from __future__ import annotations

import pytest

from miniray.common.amounts import parse_needs
from miniray.common.labels import parse_selector
from miniray.head.scheduling.reasons import ReasonKind, explain
from miniray.head.scheduling.resources import ResourcePool, node_pool


def nodes() -> list[ResourcePool]:
    """Node ab with 2 of 8 CPUs and one device of 0.4 free; node cd with 1 of 4 CPUs, no device."""
    first = node_pool("ab12cd34" * 4, {"CPU": 8, "memory": 2**30}, {"GPU": ["0", "1"]})
    first.allocate(parse_needs({"CPU": 6, "GPU": 0.6}))
    first.allocate(parse_needs({"GPU": 0.7}))
    second = node_pool("cdcdcdcd" * 4, {"CPU": 4, "licence": 1}, labels={"zone": "a"})
    second.allocate(parse_needs({"CPU": 3}))
    return [first, second]


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        (
            {"GPU": 0.6},
            "needs GPU 0.6 on one device; the freest device of node ab12cd34 has 0.4",
        ),
        ({"GPU": 2}, "needs GPU 2 in whole devices; node ab12cd34 has 0 of 2 wholly free"),
        ({"CPU": 4}, "needs CPU 4; node ab12cd34 has 2 of 8 free"),
        (
            {"CPU": 4, "GPU": 2},
            (
                "needs CPU 4; node ab12cd34 has 2 of 8 free; "
                "and needs GPU 2 in whole devices; node ab12cd34 has 0 of 2 wholly free"
            ),
        ),
        ({"FPGA": 1}, "needs FPGA 1; no node has FPGA"),
        ({"CPU": 64}, "needs CPU 64; the largest node, ab12cd34, has 8"),
        ({"GPU": 3}, "needs GPU 3; the largest node, ab12cd34, has 2"),
        ({"memory": 2**32}, "needs memory 4 GiB; the largest node, ab12cd34, has 1 GiB"),
        ({"memory": 2**50}, "needs memory 1024 TiB; the largest node, ab12cd34, has 1 GiB"),
        ({"GPU": 1, "licence": 1}, "no single node has all of GPU 1, licence 1"),
    ],
)
def test_a_reason_says_what_is_missing_where_in_numbers(
    resources: dict[str, float], sentence: str
) -> None:
    assert explain(parse_needs(resources), (), nodes(), None).sentence() == sentence


@pytest.mark.parametrize(
    ("resources", "infeasible"),
    [({"FPGA": 1}, True), ({"CPU": 64}, True), ({"CPU": 4}, False), ({"GPU": 2}, False)],
)
def test_only_what_idle_nodes_could_not_serve_is_infeasible(
    resources: dict[str, float], infeasible: bool
) -> None:
    assert explain(parse_needs(resources), (), nodes(), None).infeasible is infeasible


def test_a_reason_names_the_labels_that_no_node_has() -> None:
    reason = explain((), parse_selector({"zone": "b"}), nodes(), None)

    assert reason.sentence() == "no node matches the labels zone=b"


def test_only_nodes_with_the_labels_are_compared() -> None:
    reason = explain(parse_needs({"CPU": 4}), parse_selector({"zone": "a"}), nodes(), None)

    assert reason.sentence() == "needs CPU 4; node cdcdcdcd has 1 of 4 free"


def test_the_node_where_least_is_missing_is_named() -> None:
    assert explain(parse_needs({"CPU": 3}), (), nodes(), None).node_id.startswith("ab12")


def test_an_empty_cluster_is_a_reason() -> None:
    assert explain(parse_needs({"CPU": 1}), (), [], None).kind is ReasonKind.NO_NODES
