from __future__ import annotations

import dataclasses
import logging

import pytest

from miniray.train import (
    Callback,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_to_keep": 0}, "at least 1, not 0. None keeps all"),
        ({"num_to_keep": True}, "a whole number"),
        ({"checkpoint_score_order": "best"}, "'max'"),
        ({"checkpoint_score_attribute": ""}, "empty"),
    ],
)
def test_nonsense_in_a_checkpoint_config_is_refused_with_the_fix(arguments, message):
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**arguments)


@pytest.mark.parametrize("name", ["max_failures", "controller_failure_limit"])
@pytest.mark.parametrize("value", [-2, 1.5, True, "3"])
def test_a_limit_of_failures_that_is_no_number_of_restarts_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"FailureConfig\({name}\).*-1 for no limit"):
        FailureConfig(**{name: value})


@pytest.mark.parametrize("value", [0, -1, "10", True, float("nan")])
def test_a_limit_of_seconds_for_hangs_is_a_positive_number(value):
    with pytest.raises(ValueError, match=r"hang_timeout_s\).*above 0"):
        FailureConfig(hang_timeout_s=value)


@pytest.mark.parametrize(
    ("failures", "at_start", "goes_on"),
    [(2, False, True), (3, False, False), (1, True, True), (2, True, False)],
)
def test_failures_of_workers_and_of_starts_have_limits_of_their_own(failures, at_start, goes_on):
    config = FailureConfig(max_failures=2, controller_failure_limit=1)
    assert config.allows(failures, at_start=at_start) is goes_on
    assert FailureConfig(-1).allows(100, at_start=at_start)


@pytest.mark.parametrize(
    ("config", "name", "instead"),
    [
        (CheckpointConfig, "checkpoint_frequency", r"checkpoint to report\(\)"),
        (CheckpointConfig, "checkpoint_at_end", r"checkpoint to report\(\)"),
        (FailureConfig, "fail_fast", "max_failures=0"),
        (FailureConfig, "max_preemption_failures", "set max_failures"),
        (FailureConfig, "relax_collectives_on_preemption", "set max_failures"),
        (FailureConfig, "preemption_grace_s", "set max_failures"),
        (RunConfig, "sync_config", "in the storage"),
        (RunConfig, "verbose", "callback"),
        (RunConfig, "stop", "return from it"),
        (RunConfig, "progress_reporter", "callback"),
        (RunConfig, "log_to_file", "logs of their workers"),
    ],
)
@pytest.mark.parametrize("value", [None, 1])
def test_a_field_of_rays_that_makes_no_sense_here_is_refused_by_name(config, name, instead, value):
    refused = rf"{config.__name__}\({name}={value}\) .*{instead}"
    for kind in (ValueError, DeprecationWarning):  # the second is what Ray raises
        with pytest.raises(kind, match=refused):
            config(**{name: value})


def test_a_config_can_be_copied_with_changes():
    assert dataclasses.replace(RunConfig(name="a"), name="b").name == "b"
    assert dataclasses.replace(FailureConfig(), max_failures=2).max_failures == 2


@pytest.mark.parametrize("level", ["debug", "INFO", "Warning"])
def test_a_log_level_is_known_by_its_name(level):
    assert LoggingConfig(log_level=level).log_level == level.upper()


@pytest.mark.parametrize("level", ["LOUD", "", 10, None])
def test_a_log_level_that_does_not_exist_is_refused(level):
    with pytest.raises(ValueError, match="DEBUG, INFO, WARNING"):
        LoggingConfig(log_level=level)


def test_a_log_level_is_that_of_the_train_layer_alone():
    logger = logging.getLogger("miniray.train")
    before, root = logger.level, logging.getLogger().level
    try:
        LoggingConfig(log_level="ERROR").apply()
        assert logger.level == logging.ERROR
        assert logging.getLogger().level == root
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize("path", ["", " ", 3, b""])
def test_a_storage_path_that_is_none_is_refused(path):
    with pytest.raises(ValueError, match="folder or a URL"):
        RunConfig(storage_path=path)


def test_a_callback_that_is_not_in_a_list_is_refused():
    with pytest.raises(ValueError, match="must be a list"):
        RunConfig(callbacks=Callback())


def test_a_runtime_environment_that_can_not_be_is_refused_at_once():
    with pytest.raises(ValueError, match=r"worker_runtime_env.*conda"):
        RunConfig(worker_runtime_env={"conda": "base"})
    with pytest.raises(ValueError, match="worker_runtime_env"):
        RunConfig(worker_runtime_env=["NCCL_SOCKET_IFNAME"])


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


def test_what_a_run_config_is_not_given_is_filled_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    filled = RunConfig(storage_filesystem=object())
    assert filled.storage_path == f"{tmp_path}/miniray_results"
    assert filled.name.startswith("train_run-")
    assert filled.worker_runtime_env == {}
    assert RunConfig().name != filled.name
    assert dataclasses.replace(filled).name == filled.name
    assert RunConfig(storage_path=tmp_path).storage_path == str(tmp_path)


def test_a_storage_path_in_the_home_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunConfig(storage_path="~/runs").storage_url == f"{tmp_path}/runs"
    assert RunConfig().storage_url.startswith(str(tmp_path))


def test_a_url_is_left_as_it_is():
    assert RunConfig(storage_path="s3://bucket/runs").storage_url == "s3://bucket/runs"


def test_arguments_without_names_are_those_of_rays_order():
    assert CheckpointConfig(2, "accuracy", "min").checkpoint_score_order == "min"
    assert FailureConfig(3).max_failures == 3
    assert LoggingConfig("DEBUG").log_level == "DEBUG"
    config = RunConfig("digits", "/mnt/runs", None, FailureConfig(3))
    assert (config.name, config.storage_path) == ("digits", "/mnt/runs")
    assert config.failure_config.max_failures == 3
    assert DataConfig(["train"]).datasets_to_split == ["train"]
