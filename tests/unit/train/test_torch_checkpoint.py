"""A model, or its weights, as a checkpoint."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from miniray import train
from miniray.train import Checkpoint, RunConfig, ScalingConfig
from miniray.train.torch import TorchCheckpoint, TorchTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checkpoints are made in folders that go with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    shutil.rmtree(tmp_path)


def linear(weight: float) -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, weight)
    return model


def test_weights_come_back_in_the_model_that_is_given() -> None:
    checkpoint = TorchCheckpoint.from_state_dict(linear(3).state_dict())
    model = linear(0)
    assert checkpoint.get_model(model) is model
    assert model.weight.item() == 3
    with pytest.raises(ValueError, match="give get_model"):
        checkpoint.get_model()


def test_weights_of_a_model_that_ddp_has_wrapped_are_those_of_the_model() -> None:
    wrapped = {f"module.{name}": value for name, value in linear(3).state_dict().items()}
    model = TorchCheckpoint.from_state_dict(wrapped).get_model(linear(0))
    assert isinstance(model, torch.nn.Linear)
    assert model.weight.item() == 3


def test_a_whole_model_comes_back_by_itself() -> None:
    checkpoint = TorchCheckpoint.from_model(linear(3))
    assert str(checkpoint.get_model()) == str(linear(3))
    with pytest.warns(UserWarning, match="is not used"):
        assert checkpoint.get_model(linear(0)).weight.item() == 3  # type: ignore[operator,union-attr]


def test_it_is_a_checkpoint_and_can_be_made_of_one() -> None:
    checkpoint = TorchCheckpoint.from_state_dict(linear(3).state_dict())
    assert isinstance(checkpoint, Checkpoint)
    plain = Checkpoint(checkpoint.path)
    again = TorchCheckpoint(plain.path, plain.filesystem)
    assert again.get_model(linear(0)).state_dict()["weight"].item() == 3
    assert repr(again).startswith("TorchCheckpoint(")


def test_one_that_is_reported_is_in_the_result(tmp_path: Path) -> None:
    def loop() -> None:
        train.report({}, checkpoint=TorchCheckpoint.from_model(linear(3)))

    result = TorchTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    assert result.checkpoint is not None
    found = TorchCheckpoint(result.checkpoint.path, result.checkpoint.filesystem)
    assert str(found.get_model()) == str(linear(3))


def test_what_is_no_model_and_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file model.pt"):
        TorchCheckpoint(tmp_path).get_model()
    with pytest.raises(TypeError, match=r"model.state_dict\(\) returns"):
        TorchCheckpoint.from_state_dict(linear(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch.nn.Module, not dict"):
        TorchCheckpoint.from_model({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="preprocessor"):
        TorchCheckpoint.from_model(linear(1), preprocessor=object())  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="preprocessing in the train loop"):
        _ = TorchCheckpoint(tmp_path).get_preprocessor
