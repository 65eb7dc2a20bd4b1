"""What a run stores of itself: its configuration, and which part of its time was of use."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from miniray.train import CheckpointConfig, RunConfig, ScalingConfig
from miniray.train.callbacks import Callback
from miniray.train.controller import run_spec
from miniray.train.controller.run_spec import RunFacts, describe_run


def train_loop(config, more=None):
    pass


def test_a_configuration_is_json_that_a_person_can_read():
    class Own:
        def __repr__(self):
            return "Own()"

    run = RunConfig(name="run", checkpoint_config=CheckpointConfig(num_to_keep=2))
    described = describe_run(
        name="run",
        train_loop=functools.partial(train_loop, more=1),
        train_loop_config={"lr": 0.1, "layers": (1, 2), "data": Path("/d"), "own": Own()},
        scaling_config=ScalingConfig(num_workers=3),
        run_config=run,
    )
    described = json.loads(json.dumps(described))
    assert described["train_loop"].endswith("test_run_spec.train_loop")
    assert described["train_loop_config"]["lr"] == 0.1
    assert described["train_loop_config"]["layers"] == [1, 2]
    assert described["train_loop_config"]["own"] == "Own()"
    assert described["scaling_config"]["num_workers"] == 3
    assert described["run_config"]["checkpoint_config"]["num_to_keep"] == 2


def test_what_looks_like_a_secret_is_hidden():
    import fsspec

    filesystem = fsspec.filesystem("dir", path="/x", target_protocol="file", secret="geheim")
    described = describe_run(
        name="run",
        train_loop=train_loop,
        train_loop_config={"api_key": "geheim", "tokenizer": "bert", "num_keys": 3},
        run_config=RunConfig(
            storage_path="/x",
            storage_filesystem=filesystem,
            worker_runtime_env={"env_vars": {"HF_TOKEN": "geheim", "MODE": "fast"}},
        ),
    )
    assert "geheim" not in json.dumps(described)
    assert described["train_loop_config"]["tokenizer"] == "bert"
    assert described["run_config"]["worker_runtime_env"]["env_vars"]["MODE"] == "fast"


def test_what_a_callback_does_not_show_of_itself_may_hold_a_password_and_is_left_out():
    @dataclasses.dataclass
    class Tracker(Callback):
        address: str = dataclasses.field(repr=False)
        params: dict[str, float]

    run = RunConfig(callbacks=[Tracker("https://me:geheim@host", {"lr": 0.1})])
    described = describe_run(name="run", train_loop=train_loop, run_config=run)
    assert "geheim" not in json.dumps(described) + repr(run)
    assert described["run_config"]["callbacks"][0]["params"] == {"lr": 0.1}


def test_values_that_never_end_are_cut():
    endless: list[object] = []
    endless.append(endless)
    config = {"a": endless, "b": "x" * 10_000, "c": list(range(10_000))}
    described = describe_run(name="run", train_loop=train_loop, train_loop_config=config)
    assert len(json.dumps(described)) < 10_000
    assert described["train_loop_config"]["c"][-1] == "... and 9800 more"


def test_values_without_a_text_are_named_by_their_class():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no text")

    described = describe_run(name="run", train_loop=train_loop, train_loop_config={"a": Broken()})
    assert described["train_loop_config"] == {"a": "Broken"}


def test_time_in_train_loops_counts_up_to_a_checkpoint_and_to_the_end_of_a_run_that_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(run_spec, "time", SimpleNamespace(time=lambda: clock.now))
    facts = RunFacts("run", "0123", "token", started=100.0)
    facts.begin_attempt(2)
    facts.since = clock.now = 120.0
    assert facts.productive_ratio() == 0.0
    clock.now = 140.0
    facts.keep()
    assert facts.productive_ratio() == 0.5
    clock.now = 200.0
    facts.end_attempt("FAILED", "spoilt")
    assert facts.productive_ratio() == 0.2
    facts.begin_attempt(2)
    facts.end_attempt("FAILED", "did not start")
    facts.begin_attempt(2)
    facts.since, clock.now = 210.0, 300.0
    facts.end_attempt("FINISHED", "")
    assert facts.productive_ratio() == pytest.approx(0.55)
