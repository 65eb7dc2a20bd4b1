from __future__ import annotations

import pytest

from miniray.train import Callback, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig


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
        ({"num_workers": 0}, "1 or more"),
        ({"num_workers": -2}, "1 or more"),
        ({"num_workers": 1.5}, "whole number"),
        ({"num_workers": True}, "whole number"),
        ({"resources_per_worker": {"GPU": 1}}, "Set use_gpu=True"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0}}, "contradicts itself"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 1.5}}, "whole number"),
        ({"resources_per_worker": {"CPU": -1}}, "0 or more"),
        ({"resources_per_worker": {"CPU": float("nan")}}, "0 or more"),
        ({"resources_per_worker": {"CPU": "2"}}, "0 or more"),
        ({"resources_per_worker": {"cpu": 1}}, "Write 'CPU'"),
        ({"resources_per_worker": {"": 1}}, "non-empty"),
        ({"resources_per_worker": [1]}, "dictionary"),
        ({"resources_per_worker": {"CPU": 0}}, "asks for nothing"),
        ({"trainer_resources": {"CPU": -1}}, "0 or more"),
        ({"placement_strategy": "CLOSE"}, "STRICT_SPREAD"),
    ],
)
def test_nonsense_in_a_scaling_config_is_refused_with_the_fix(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScalingConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_to_keep": 0}, "1 or more"),
        ({"num_to_keep": True}, "1 or more"),
        ({"checkpoint_score_order": "best"}, "'max'"),
        ({"checkpoint_score_attribute": ""}, "key of the metrics"),
    ],
)
def test_nonsense_in_a_checkpoint_config_is_refused_with_the_fix(arguments, message):
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**arguments)


def test_fewer_restarts_than_without_limit_are_refused():
    with pytest.raises(ValueError, match="-1 for no limit"):
        FailureConfig(max_failures=-2)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", ".."])
def test_a_run_name_that_is_no_folder_name_is_refused(name):
    with pytest.raises(ValueError, match="name of one folder"):
        RunConfig(name=name)


def test_a_callback_of_another_class_is_refused():
    with pytest.raises(ValueError, match=r"subclass of miniray\.train\.Callback"):
        RunConfig(callbacks=[object()])
    assert RunConfig(callbacks=[Callback()]).callbacks


def test_a_config_of_another_class_is_refused():
    with pytest.raises(ValueError, match=r"miniray\.train\.FailureConfig"):
        RunConfig(failure_config=CheckpointConfig())


def test_a_filesystem_without_a_path_on_it_is_refused():
    with pytest.raises(ValueError, match="needs a storage_path"):
        RunConfig(storage_filesystem=object())


def test_a_storage_path_in_the_home_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunConfig(storage_path="~/runs").storage_url == f"{tmp_path}/runs"
    assert RunConfig().storage_url.startswith(str(tmp_path))


def test_a_url_is_left_as_it_is():
    assert RunConfig(storage_path="s3://bucket/runs").storage_url == "s3://bucket/runs"
