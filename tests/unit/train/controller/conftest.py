"""Controllers of training whose worker groups run in the test's own process."""

from __future__ import annotations

import secrets

import pytest
from controller_helpers import FakeGroup

from miniray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from miniray.train.controller.controller import TrainController
from miniray.train.controller.run_spec import RunSpec
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.backend import Backend


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Makes a controller whose groups are collected in ``controller.groups``."""
    monkeypatch.setattr("miniray.train.controller.controller.FAILURE_GRACE", 0.1)

    def make(
        workers=2,
        max_failures=0,
        callbacks=(),
        make_group=None,
        placement_timeout_s=None,
        controller_failure_limit=-1,
        hang_timeout=None,
        run_id=None,
        configuration=None,
        **checkpoint_config,
    ):
        failure_config = FailureConfig(
            max_failures=max_failures,
            controller_failure_limit=controller_failure_limit,
            hang_timeout_s=hang_timeout,
        )
        run_config = RunConfig(
            failure_config=failure_config,
            checkpoint_config=CheckpointConfig(**checkpoint_config),
            callbacks=list(callbacks),
        )
        scaling_config = ScalingConfig(
            num_workers=workers,
            placement_timeout_s=placement_timeout_s,
            elastic_resize_monitor_interval_s=0,
        )
        spec = RunSpec(
            storage=RunStorage(tmp_path, "run"),
            run_config=run_config,
            scaling_config=scaling_config,
            backend=Backend(),
            failures=failure_config,
            group=scaling_config.group,
            configuration=configuration or {},
            run_id=run_id or secrets.token_hex(4),
        )
        groups = []
        controller = TrainController(
            spec, make_group or (lambda _, decision: FakeGroup(decision.num_workers, groups))
        )
        controller.groups = groups
        return controller

    return make
