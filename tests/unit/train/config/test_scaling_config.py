from __future__ import annotations

import dataclasses
import pickle

import pytest

from miniray.train import ScalingConfig


def test_a_worker_holds_one_cpu_by_default():
    assert ScalingConfig(num_workers=4).worker_resources == {"CPU": 1.0}


def test_a_gpu_worker_holds_one_gpu_and_no_cpu_by_default():
    assert ScalingConfig(use_gpu=True).worker_resources == {"GPU": 1.0}


def test_a_worker_may_hold_a_share_of_a_gpu():
    config = ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 4, "GPU": 0.5})
    assert config.worker_resources == {"CPU": 4, "GPU": 0.5}


def test_use_gpu_adds_one_gpu_to_given_resources():
    config = ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 4})
    assert config.worker_resources == {"CPU": 4, "GPU": 1.0}


def test_resources_of_zero_are_not_held():
    config = ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 0, "GPU": 2})
    assert config.worker_resources == {"GPU": 2}


def test_an_accelerator_type_is_a_small_demand_of_its_resource():
    config = ScalingConfig(use_gpu=True, accelerator_type="A100")
    assert config.worker_resources == {"GPU": 1.0, "accelerator_type:A100": 0.001}


def test_the_controller_holds_nothing_by_default():
    assert ScalingConfig().controller_resources == {}


def test_total_resources_are_those_of_the_controller_and_every_worker():
    config = ScalingConfig(
        num_workers=4, resources_per_worker={"CPU": 2}, trainer_resources={"CPU": 1}
    )
    assert config.total_resources == {"CPU": 9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -2}, "1 or more"),
        ({"num_workers": 1.5}, "whole number"),
        ({"num_workers": True}, "whole number"),
        ({"num_workers": "4"}, "whole number"),
        ({"num_workers": (4, 2)}, r"Write \(2, 4\)"),
        ({"num_workers": (0, 2)}, "1 or more each"),
        ({"num_workers": (1, 2, 3)}, "a pair"),
        ({"num_workers": (1, 2.5)}, "a pair"),
        ({"use_gpu": 1}, "True or False"),
        ({"use_gpu": True, "use_tpu": True}, "leave one of them out"),
        ({"accelerator_type": ""}, "empty"),
        ({"accelerator_type": 100}, "a string"),
        ({"elastic_resize_monitor_interval_s": -1}, "at least 0"),
        ({"placement_timeout_s": 0}, "above 0"),
        ({"placement_timeout_s": float("inf")}, "above 0"),
        ({"label_selector": ["zone"]}, "dict of label"),
        ({"label_selector": {"zone": 1}}, "string"),
        ({"label_selector": {"zone": "in(a"}}, "exists"),
        ({"num_workers": 2, "label_selector": [{"zone": "a"}]}, "one dictionary for each worker"),
        ({"resources_per_worker": {"GPU": 1}}, "Set use_gpu=True"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0}}, "contradicts itself"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 1.5}}, "whole number"),
        ({"resources_per_worker": {"CPU": -1}}, "at least 0"),
        ({"resources_per_worker": {"CPU": float("nan")}}, "at least 0"),
        ({"resources_per_worker": {"CPU": "2"}}, "a number"),
        ({"resources_per_worker": {"neuron_cores": 0.5}}, "whole"),
        ({"resources_per_worker": {"NPU": 2.5}}, "Use 2 or 3"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.00001}}, "finer than"),
        ({"resources_per_worker": {"cpu": 1}}, "Write 'CPU'"),
        ({"resources_per_worker": {"": 1}}, "empty"),
        ({"resources_per_worker": [1]}, "dictionary"),
        ({"resources_per_worker": {"CPU": 0}}, "asks for nothing"),
        ({"trainer_resources": {"CPU": -1}}, "at least 0"),
        ({"placement_strategy": "CLOSE"}, "STRICT_SPREAD"),
    ],
)
def test_nonsense_in_a_scaling_config_is_refused_with_the_fix(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScalingConfig(**arguments)


def test_a_pair_of_numbers_is_a_group_that_may_grow_and_shrink():
    config = ScalingConfig(num_workers=(2, 8), resources_per_worker={"CPU": 2})
    assert config.elasticity_enabled
    assert (config.min_workers, config.max_workers) == (2, 8)
    assert config.total_resources == {"CPU": 16}
    assert ScalingConfig(num_workers=[2, 8]).num_workers == (2, 8)
    assert not ScalingConfig(num_workers=3).elasticity_enabled


def test_no_workers_mean_the_drivers_process():
    assert ScalingConfig(num_workers=0).max_workers == 0


def test_a_label_selector_is_that_of_every_worker_or_of_each():
    one = ScalingConfig(num_workers=2, label_selector={"zone": "in(a, b)"})
    assert one.bundle_label_selectors(2) == [{"zone": "in(a, b)"}] * 2
    each = ScalingConfig(num_workers=2, label_selector=[{"zone": "a"}, {"zone": "!b"}])
    assert each.bundle_label_selectors(2) == [{"zone": "a"}, {"zone": "!b"}]
    assert each.bundle_label_selectors(1) == [{"zone": "a"}]
    assert ScalingConfig().bundle_label_selectors(1) is None


# --- TPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "topology", "workers", "chips"),
    [
        ("TPU-V6E", "4x4", 4, 4),
        ("TPU-V6E", "4x4", 8, 4),
        ("TPU-V6E", "2x4", 1, 8),
        ("TPU-V6E", "1x1", 1, 1),
        ("TPU-V4", "2x2x4", 4, 4),
        ("TPU-V5P", "2x2x1", 1, 4),
        ("TPU-V5LITEPOD", "2x2", 1, 4),
    ],
)
def test_a_tpu_worker_holds_the_chips_of_a_host_of_its_slice(kind, topology, workers, chips):
    config = ScalingConfig(
        num_workers=workers, use_tpu=True, topology=topology, accelerator_type=kind
    )
    assert config.worker_resources == {
        "CPU": 1.0,
        "TPU": chips,
        f"accelerator_type:{kind}": 0.001,
    }
    assert config.num_tpus_per_worker == chips
    assert config.additional_resources_per_worker == {f"accelerator_type:{kind}": 0.001}


@pytest.mark.parametrize("kind", ["v6e", "V6E", "tpu-v6e"])
def test_a_tpu_type_is_asked_for_by_the_name_that_nodes_have(kind):
    config = ScalingConfig(num_workers=4, use_tpu=True, topology="4x4", accelerator_type=kind)
    assert config.worker_resources["accelerator_type:TPU-V6E"] == 0.001


@pytest.mark.parametrize("chips", [1, 2, 4])
def test_a_tpu_worker_may_hold_some_chips_of_its_host(chips):
    config = ScalingConfig(
        num_workers=4,
        use_tpu=True,
        topology="4x4",
        accelerator_type="TPU-V6E",
        resources_per_worker={"TPU": chips},
    )
    assert config.num_tpus_per_worker == chips


def test_one_tpu_worker_needs_no_topology():
    assert ScalingConfig(use_tpu=True).worker_resources == {"TPU": 1.0}
    assert ScalingConfig(use_tpu=True, resources_per_worker={"CPU": 4}).worker_resources == {
        "CPU": 4,
        "TPU": 1.0,
    }


def test_the_workers_of_a_slice_run_on_the_hosts_of_one_slice_each_on_one():
    slices = {"use_tpu": True, "topology": "4x4", "accelerator_type": "TPU-V6E"}
    config = ScalingConfig(num_workers=8, **slices)
    assert config.bundle_label_selectors(8) == [
        {"ray.io/tpu-pod-type": "v6e-16", "ray.io/tpu-slice-name": f"same({number})"}
        for number in (0, 0, 0, 0, 1, 1, 1, 1)
    ]
    assert config.bundle_strategy == "STRICT_SPREAD"
    elastic = ScalingConfig(num_workers=(4, 8), **slices)
    assert elastic.bundle_label_selectors(4) == [{"ray.io/tpu-pod-type": "v6e-16"}] * 4


def test_other_workers_lie_as_the_strategy_says():
    assert ScalingConfig(num_workers=2).bundle_strategy == "PACK"
    assert ScalingConfig(placement_strategy="SPREAD").bundle_strategy == "SPREAD"
    slices = {"use_tpu": True, "topology": "2x4", "accelerator_type": "TPU-V6E"}
    assert ScalingConfig(num_workers=2, **slices).bundle_strategy == "PACK"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": None}, "needs topology"),
        ({"accelerator_type": None}, "needs accelerator_type"),
        ({"num_workers": 1, "accelerator_type": None}, "needs accelerator_type"),
        ({"num_workers": 6}, "Use a multiple of 4, such as 8"),
        ({"num_workers": (2, 8)}, "Use a multiple of 4"),
        ({"topology": "3x3"}, "has no topology '3x3'"),
        ({"accelerator_type": "A100"}, "names no TPU generation"),
        ({"resources_per_worker": {"TPU": 3}}, "1, 2, 4, 8"),
        ({"resources_per_worker": {"TPU": 0.5}}, "1, 2, 4, 8"),
        ({"resources_per_worker": {"TPU": 8}}, "at most 4"),
        ({"resources_per_worker": {"TPU": 0}}, "contradicts itself"),
        ({"use_tpu": False, "resources_per_worker": {"TPU": 4}}, "Set use_tpu=True"),
        ({"use_tpu": False}, "Set use_tpu=True"),
        ({"label_selector": {"zone": "a"}}, "Leave label_selector out"),
    ],
)
def test_nonsense_about_tpus_is_refused_with_the_fix(arguments, message):
    given = {
        "num_workers": 4,
        "use_tpu": True,
        "topology": "4x4",
        "accelerator_type": "TPU-V6E",
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        ScalingConfig(**given)


def test_a_number_without_a_name_is_refused():
    with pytest.raises(TypeError, match="positional argument"):
        ScalingConfig(2)


def test_a_scaling_config_is_copied_like_any_dataclass():
    config = ScalingConfig(num_workers=(1, 3), use_gpu=True)
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, num_workers=2).num_workers == 2
