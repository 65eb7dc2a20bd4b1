"""Options: what is refused, with which words, and what the accepted ones add up to."""

from __future__ import annotations

import enum
import marshal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from miniray import options
from miniray.common.specs import Anywhere, BundleAffinity, NodeAffinity, Spread
from miniray.util.placement_group import PlacementGroup
from miniray.util.scheduling_strategies import (
    DoesNotExist,
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroupSchedulingStrategy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE = "0a" * 8


class Two(enum.IntEnum):
    TWO = 2


class Name(str, enum.Enum):
    IT = "it"


class Half(float): ...


def task(**given: Any) -> Any:
    return options.task_options(options.check_task(given))


def actor(**given: Any) -> Any:
    return options.actor_options(options.check_actor(given))


def method(**given: Any) -> Any:
    return options.method_options(options.check_method(given))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"num_gpu": 1}, ValueError, "Did you mean 'num_gpus'"),
        ({"max_restarts": 1}, ValueError, "'max_restarts' is an option of actors, not of a task"),
        ({"num_cpus": "1"}, TypeError, "num_cpus must be a number, not '1'"),
        ({"num_cpus": True}, TypeError, "num_cpus must be a number, not True"),
        ({"num_cpus": -1}, ValueError, "num_cpus must be a finite number of at least 0, not -1"),
        ({"num_cpus": float("nan")}, ValueError, "num_cpus must be a finite number"),
        ({"num_cpus": 0.00001}, ValueError, "finer than 0.0001"),
        ({"num_cpus": float("inf")}, ValueError, "num_cpus must be a finite number"),
        ({"num_cpus": 10**400}, ValueError, "num_cpus must be at most 1e+19, not a number of"),
        ({"memory": 1e308}, ValueError, "memory must be at most 1e+19, not 1e+308"),
        ({"resources": {"a": -float("inf")}}, ValueError, "resources['a'] must be a finite"),
        ({"num_returns": 2**70}, ValueError, "num_returns must be at most 1,000,000, not 11805"),
        ({"max_retries": 2**70}, ValueError, "max_retries must be at most 9,223,372,036,854"),
        ({"max_calls": 2**40}, ValueError, "max_calls must be at most 2,147,483,647, not 1099"),
        ({"num_gpus": 1.5}, ValueError, "not 1.5. Use 1 or 2"),
        ({"resources": {"NPU": 2.5}}, ValueError, "Use 2 or 3"),
        ({"resources": {"neuron_cores": 0.5}}, ValueError, "neuron_cores"),
        ({"resources": {"TPU": 0.5}}, ValueError, "TPU"),
        ({"resources": {"HPU": 0.5}}, ValueError, "HPU"),
        ({"resources": {"CPU": 1}}, ValueError, "use the option num_cpus instead"),
        ({"resources": {"GPU": 1}}, ValueError, "use the option num_gpus instead"),
        ({"resources": {"memory": 1}}, ValueError, "use the option memory instead"),
        ({"resources": ["x"]}, TypeError, "resources must be a dict"),
        ({"resources": {3: 1}}, TypeError, "A resource name in resources"),
        ({"num_returns": -1}, ValueError, "num_returns must be a whole number of at least 0"),
        ({"num_returns": "many"}, ValueError, "'streaming', 'dynamic'"),
        ({"num_returns": 1.0}, TypeError, "num_returns must be a whole number"),
        ({"num_returns": "streaming"}, ValueError, "generator functions"),
        ({"max_retries": -2}, ValueError, "-1 is without end"),
        ({"max_calls": -1}, ValueError, "max_calls"),
        ({"retry_exceptions": [3]}, TypeError, "Each item of retry_exceptions"),
        ({"retry_exceptions": "all"}, TypeError, "True, False or a list"),
        ({"name": 3}, TypeError, "name must be a string, not 3"),
        ({"name": ""}, ValueError, "name must not be an empty string"),
        ({"accelerator_type": 3}, TypeError, "accelerator_type"),
        ({"scheduling_strategy": "SPRAED"}, ValueError, "'DEFAULT', 'SPREAD', not 'SPRAED'"),
        ({"scheduling_strategy": 3}, TypeError, "NodeAffinitySchedulingStrategy"),
        ({"placement_group": 3}, TypeError, "a PlacementGroup"),
        ({"placement_group_bundle_index": 1}, ValueError, "needs the option placement_group"),
        ({"label_selector": {"zone": "in("}}, ValueError, "label_selector"),
        ({"label_selector": {"-": "a"}}, ValueError, "A label in label_selector"),
        ({"label_selector": {"zone": 3}}, TypeError, "zone"),
        ({"label_selector": {"rack": "same(a)"}}, ValueError, "label_selector"),
        ({"runtime_env": 3}, TypeError, "runtime_env"),
        ({"runtime_env": {"conda": "x"}}, ValueError, "conda"),
        ({"object_store_memory": 3}, ValueError, "an option of actors"),
        ({"tensor_transport": "nccl"}, ValueError, "not supported by miniray"),
        ({"fallback_strategy": {"label_selector": {}}}, TypeError, "a list of dicts"),
        ({"fallback_strategy": [{"zone": "a"}]}, ValueError, "fallback_strategy[0] must"),
        (
            {"fallback_strategy": [{"label_selector": {"a": "in("}}]},
            ValueError,
            "[0]['label_selector']['a']",
        ),
        ({"_generator_backpressure_num_objects": 0}, ValueError, "must be positive"),
    ],
)
def test_a_task_refuses(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        task(**given)

    assert type(caught.value) is error
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"max_retries": 1}, ValueError, "an option of tasks"),
        ({"max_concurency": 2}, ValueError, "Did you mean 'max_concurrency'"),
        ({"max_concurrency": 0}, ValueError, "at least 1"),
        ({"max_concurrency": 10**9}, ValueError, "must be at most 1,000,000, not 1000000000"),
        ({"concurrency_groups": {"io": 10**9}}, ValueError, "must be at most 1,000,000"),
        ({"max_restarts": -2}, ValueError, "-1 is without end"),
        ({"max_task_retries": 1.5}, TypeError, "max_task_retries"),
        ({"max_pending_calls": -2}, ValueError, "-1 is no limit"),
        ({"lifetime": "for ever"}, ValueError, "'detached', 'non_detached'"),
        ({"get_if_exists": True}, ValueError, "needs the option name"),
        ({"get_if_exists": 1, "name": "n"}, TypeError, "True or False"),
        ({"namespace": ""}, ValueError, "namespace"),
        ({"concurrency_groups": {"io": 0}}, ValueError, "concurrency_groups['io']"),
        ({"concurrency_groups": 3}, TypeError, "concurrency_groups must be a dict"),
        ({"concurrency_groups": [{"name": "io"}]}, ValueError, "max_concurrency"),
        ({"enable_tensor_transport": True}, ValueError, "not supported by miniray"),
    ],
)
def test_an_actor_refuses(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        actor(**given)

    assert words in str(caught.value)


def test_a_method_refuses_what_belongs_to_actors() -> None:
    with pytest.raises(ValueError, match="'num_cpus' is an option of tasks and actors"):
        method(num_cpus=1)


def parts(value: Any) -> Iterator[Any]:
    """The texts and numbers that a value is made of, keys of dicts included."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from parts(each)
    else:
        yield value


@pytest.mark.parametrize(
    "given",
    [
        {"num_cpus": np.float64(0.5), "num_gpus": Half(0.5), "resources": {Name.IT: Two.TWO}},
        {"resources": {np.str_("it"): np.float64(0.5)}, "accelerator_type": np.str_("A100")},
        {"name": Name.IT, "label_selector": {np.str_("zone"): Name.IT}},
        {"fallback_strategy": [{"label_selector": {Name.IT: np.str_("a")}}]},
        {"scheduling_strategy": NodeLabelSchedulingStrategy({Name.IT: In(Name.IT)})},
    ],
)
def test_what_is_asked_for_is_plain_numbers_and_texts(given: dict[str, Any]) -> None:
    """``marshal`` writes others as bytes, or refuses them."""
    for made in (task(**given), actor(**given)):
        asked = (made.resources, made.name, made.label_selector)
        found = {type(each) for each in parts((*asked, made.fallback_selectors))}
        assert found <= {str, float, int, type(None)}
        assert marshal.loads(marshal.dumps(asked)) == asked


def test_a_text_of_an_enum_counts_as_its_value() -> None:
    assert task(resources={Name.IT: 1}).resources == {"CPU": 1, "it": 1}
    assert repr(actor(name=Name.IT, namespace=np.str_("n")).name) == "'it'"


def test_numbers_of_an_actor_and_a_method_are_plain() -> None:
    counted = actor(max_concurrency=Two.TWO, max_restarts=Two.TWO, concurrency_groups={Name.IT: 2})
    told = (counted.max_concurrency, counted.max_restarts, counted.concurrency_groups)
    assert marshal.loads(marshal.dumps(told)) == (2, 2, {"it": 2})

    named = method(concurrency_group=Name.IT, num_returns=Two.TWO, name=np.str_("call"))
    assert {type(each) for each in (named.concurrency_group, named.name)} == {str}
    assert type(named.num_returns) is int


def test_numpys_whole_numbers_are_refused_as_in_ray() -> None:
    with pytest.raises(TypeError, match=r"num_cpus must be a number, not .*int64"):
        task(num_cpus=np.int64(1))


def test_a_task_whose_worker_was_lost_is_tried_three_times_more_unless_it_says_otherwise() -> None:
    assert task().max_retries == 3
    assert not task().retry_exceptions
    assert task(max_retries=0).max_retries == 0


def test_a_task_needs_one_cpu_unless_it_says_otherwise() -> None:
    assert task().resources == {"CPU": 1}
    assert task(num_cpus=0).resources == {}
    assert task(num_cpus=0.5, num_gpus=0.25).resources == {"CPU": 0.5, "GPU": 0.25}


def test_an_actor_without_num_cpus_needs_a_cpu_only_to_be_placed() -> None:
    plain = actor(num_gpus=1)

    assert plain.resources == {"GPU": 1}
    assert plain.placement_resources == {"GPU": 1, "CPU": 1}


def test_an_actor_with_num_cpus_holds_them() -> None:
    assert actor(num_cpus=2).resources == actor(num_cpus=2).placement_resources == {"CPU": 2}
    assert actor(num_cpus=0).placement_resources == {}


def test_an_accelerator_type_is_a_small_demand_of_its_own() -> None:
    assert task(accelerator_type="A100").resources == {"CPU": 1, "accelerator_type:A100": 0.001}


def test_memory_is_counted_in_whole_bytes() -> None:
    assert task(memory=10.7).resources["memory"] == 10


def test_none_means_the_default() -> None:
    assert task(num_cpus=None, max_retries=None) == task()


def test_options_hold_until_others_replace_them() -> None:
    base = options.check_task({"num_cpus": 2, "max_retries": 5})

    merged = options.task_options(options.check_task({"num_cpus": None, "num_gpus": 1}, base))

    assert merged.resources == {"CPU": 1, "GPU": 1}
    assert merged.max_retries == 5


def test_max_calls_and_concurrency_groups_belong_to_the_decorator() -> None:
    with pytest.raises(ValueError, match="max_calls belongs to the decorator"):
        options.check_task({"max_calls": 1}, {})
    with pytest.raises(ValueError, match="concurrency_groups belong to the decorator"):
        options.check_actor({"concurrency_groups": {}}, {})


def test_max_calls_is_known_to_be_given() -> None:
    assert task(max_calls=0).max_calls == 0
    assert task().max_calls is None


def test_generators_stream_by_default() -> None:
    assert options.task_options({}, is_generator=True).num_returns == "streaming"
    assert options.task_options({"num_returns": 3}, is_generator=True).num_returns == 3


def test_concurrency_groups_may_be_a_list_as_in_ray() -> None:
    groups = actor(concurrency_groups=[{"name": "io", "max_concurrency": 2}]).concurrency_groups

    assert groups == {"io": 2}


def test_scheduling_strategies_become_placements() -> None:
    node = NodeAffinitySchedulingStrategy(NODE, soft=True)

    assert task(scheduling_strategy="SPREAD").placement == Spread()
    assert task(scheduling_strategy="DEFAULT").placement == Anywhere()
    assert task().placement is None
    assert task(scheduling_strategy=node).placement == NodeAffinity(NODE, soft=True)


def test_a_bundle_is_asked_for_by_group_and_index() -> None:
    group = PlacementGroup(b"g" * 16, [{"CPU": 1}, {"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, 1, placement_group_capture_child_tasks=True)

    assert task(scheduling_strategy=strategy).placement == BundleAffinity(group.id, 1, True)
    assert task(placement_group=group).placement == BundleAffinity(group.id, -1, None)
    assert task(placement_group="default").placement is None
    as_the_caller = PlacementGroupSchedulingStrategy("default")
    assert task(scheduling_strategy=as_the_caller).placement is None
    assert task(placement_group=None).placement == Anywhere()
    assert task(placement_group=None, scheduling_strategy="SPREAD").placement == Spread()


@pytest.mark.parametrize(
    "options",
    [
        {"scheduling_strategy": PlacementGroupSchedulingStrategy(None)},
        {"scheduling_strategy": NodeLabelSchedulingStrategy({"zone": In("a")})},
    ],
)
def test_who_says_so_is_in_no_group(options: dict[str, Any]) -> None:
    assert task(**options).placement == Anywhere()


def test_a_group_and_a_strategy_exclude_each_other() -> None:
    group = PlacementGroup(b"g" * 16, [{"CPU": 1}])

    with pytest.raises(ValueError, match="can't be given together"):
        task(placement_group=group, scheduling_strategy="SPREAD")


def test_a_demand_that_no_bundle_can_meet_is_refused_at_once() -> None:
    group = PlacementGroup(b"g" * 16, [{"GPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group)

    with pytest.raises(ValueError, match="does not fit into any bundle"):
        task(scheduling_strategy=strategy)
    with pytest.raises(ValueError, match="num_cpus=0"):
        actor(num_gpus=1, scheduling_strategy=strategy)
    assert actor(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).placement is not None
    with pytest.raises(ValueError, match="does not fit into any bundle") as refused:
        task(num_cpus=0, num_gpus=2, scheduling_strategy=strategy)
    assert "num_cpus" not in str(refused.value)  # a CPU is not what is missing


def test_capturing_is_true_or_false() -> None:
    strategy = PlacementGroupSchedulingStrategy(
        PlacementGroup(b"g" * 16, [{"CPU": 1}]),
        0,
        placement_group_capture_child_tasks=np.bool_(False),  # type: ignore[arg-type]
    )
    with pytest.raises(TypeError, match="placement_group_capture_child_tasks must be True or"):
        task(scheduling_strategy=strategy)


def test_a_bundle_index_beyond_the_group_is_refused() -> None:
    group = PlacementGroup(b"g" * 16, [{"CPU": 1}])

    with pytest.raises(ValueError, match="must be at most 0"):
        task(placement_group=group, placement_group_bundle_index=1)


def test_conditions_on_labels_are_written_as_a_selector() -> None:
    strategy = NodeLabelSchedulingStrategy(
        {"a": In("x", "y"), "b": NotIn("z"), "c": Exists(), "d": DoesNotExist()}
    )

    assert task(scheduling_strategy=strategy, label_selector={"e": "!v"}).label_selector == {
        "a": "in(x,y)",
        "b": "!in(z)",
        "c": "exists()",
        "d": "!exists()",
        "e": "!v",
    }


def test_wishes_and_fallbacks_are_further_selectors_the_best_first() -> None:
    strategy = NodeLabelSchedulingStrategy({"a": In("x", "y")}, soft={"a": In("x"), "b": Exists()})
    found = task(scheduling_strategy=strategy)
    assert found.label_selector == {"a": "in(x,y)&in(x)", "b": "exists()"}
    assert found.fallback_selectors == ({"a": "in(x,y)"},)

    only_soft = NodeLabelSchedulingStrategy(None, soft={"a": In("x")})
    assert actor(scheduling_strategy=only_soft).fallback_selectors == ({},)

    falls_back = task(label_selector={"a": "x"}, fallback_strategy=[{"label_selector": {"a": "y"}}])
    assert falls_back.label_selector == {"a": "x"}
    assert falls_back.fallback_selectors == ({"a": "y"},)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NodeAffinitySchedulingStrategy("not hex", soft=False),
        lambda: NodeAffinitySchedulingStrategy("", soft=False),
        lambda: NodeLabelSchedulingStrategy({}),
        lambda: NodeLabelSchedulingStrategy({"a": "x"}),  # type: ignore[dict-item]
        lambda: In(),
    ],
)
def test_strategies_check_their_arguments(make: Any) -> None:
    with pytest.raises(ValueError, match=r"node_id|empty|must be|at least one"):
        make()


def test_options_without_an_effect_are_accepted_with_a_warning_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="enable_task_events") as caught:
        task(enable_task_events=False)

    assert caught[0].filename == __file__


def test_a_method_s_options_hold_over_those_of_its_declaration() -> None:
    declared = method(num_returns=2, concurrency_group="io", max_task_retries=3)

    merged = options.method_options({"num_returns": 1}, base=declared)

    assert merged.num_returns == 1
    assert merged.concurrency_group == "io"
    assert merged.max_task_retries == 3
