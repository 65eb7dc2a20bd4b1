from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import threading

import pytest

from miniray.train import (
    BackendConfig,
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from miniray.train.base.exceptions import WorkerFailure
from miniray.train.base.states import RunState, check_transition
from miniray.train.controller.feed import Progress, Row
from miniray.train.controller.run_spec import RunOutcome, make_error
from miniray.train.controller.worker_group import worker_options
from miniray.train.data_parallel_trainer import make_train_loop
from miniray.train.run.display import PlainDisplay, ProgressMeter, make_display
from miniray.train.torch import TorchTrainer
from miniray.train.worker.worker import sent
from miniray.values.serialization import serialize


def test_an_unknown_name_of_the_train_layer_is_an_attribute_error():
    import miniray.train

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        miniray.train.nothing  # noqa: B018
    assert set(miniray.train.__all__) <= set(dir(miniray.train))


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("miniray.train", "SyncConfig", "is in the storage when report"),
        ("miniray.train", "NCCLHangError", "hang_timeout_s"),
        ("miniray.train", "get_preemption_info", "max_failures"),
        ("miniray.train.torch", "xla", "JaxTrainer"),
        ("miniray.train.torch", "accelerate", "torch.autocast"),
    ],
)
def test_a_name_that_only_ray_has_says_what_to_do_instead(module, name, instead):
    with pytest.raises(AttributeError, match=instead):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("module", "home", "names"),
    [
        ("data_parallel_trainer", "train", "DataParallelTrainer"),
        ("torch.config", "train.torch", "TorchConfig"),
        ("torch.torch_trainer", "train.torch", "TorchTrainer"),
        ("v2.api.data_parallel_trainer", "train", "DataParallelTrainer"),
        ("v2.api.config", "train", "CheckpointConfig FailureConfig LoggingConfig RunConfig"),
        ("v2.api.config", "train", "ScalingConfig"),
        ("v2.api.exceptions", "train", "ControllerError TrainingFailedError WorkerGroupError"),
        ("v2.api.result", "train", "Result"),
        ("v2.api.callback", "train", "UserCallback"),
        ("v2.api.report_config", "train", "CheckpointConsistencyMode CheckpointUploadMode"),
        ("v2.torch.torch_trainer", "train.torch", "TorchTrainer"),
        ("v2.torch.train_loop_utils", "train.torch", "get_device get_devices prepare_model"),
        ("v2.torch.train_loop_utils", "train.torch", "prepare_data_loader prepare_optimizer"),
        ("v2.torch.train_loop_utils", "train.torch", "enable_reproducibility"),
        ("v2.jax.jax_trainer", "train.jax", "JaxTrainer"),
    ],
)
def test_a_name_is_found_at_the_path_where_ray_has_it(module, home, names):
    found = importlib.import_module(f"miniray.train.{module}")
    for name in names.split():
        assert getattr(found, name) is getattr(importlib.import_module(f"miniray.{home}"), name)


def test_the_usual_name_of_the_data_to_train_on_is_that_of_ray():
    assert importlib.import_module("miniray.train").TRAIN_DATASET_KEY == "train"


@pytest.mark.parametrize("name", ["backend_cls", "train_func_context"])
def test_a_backend_configuration_that_is_written_for_ray_is_refused_when_it_is_defined(name):
    with pytest.raises(TypeError, match=rf"Config\.{name} is how Ray's trainers"):
        type("Config", (BackendConfig,), {name: property(lambda self: None)})


@pytest.mark.parametrize("method", ["restore", "can_restore"])
def test_restoring_a_trainer_is_starting_it_again(method, tmp_path):
    with pytest.raises(DeprecationWarning, match=rf"TorchTrainer\.{method}\(\).*same RunConfig"):
        getattr(TorchTrainer, method)(tmp_path)


def test_a_train_loop_that_can_not_be_sent_names_the_variable_or_the_item():
    lock = threading.Lock()

    def loop(config):
        lock.acquire()

    def pickled(loop):
        return serialize(loop)

    with pytest.raises(
        TypeError, match=r"train_loop_per_worker.*variable 'lock'.*train loop"
    ) as it:
        sent(make_train_loop(loop, None), pickled)
    assert str(it.value).count("Create it inside") == 1
    with pytest.raises(TypeError, match=r"train_loop_config.*\['lock'\] is a lock"):
        sent(make_train_loop(print, {"lock": lock}), pickled)
    assert sent(make_train_loop(print, {"n": 1}), pickled).refs == []


def test_a_train_loop_without_a_signature_is_given_the_config_that_there_is(caplog):
    assert make_train_loop(max, {"n": 1}).arguments == ({"n": 1},)
    assert make_train_loop(max, None).arguments == ()
    assert caplog.text == ""


def make_spec(workers, tmp_path, **run_options):
    return DataParallelTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=tmp_path, **run_options),
    )._make_spec()


def test_a_pair_as_number_of_workers_makes_the_group_elastic(tmp_path):
    group = make_spec((2, 4), tmp_path).group
    assert (group.least, group.num_workers) == (2, 4)
    assert make_spec(3, tmp_path).group.least is None


def test_a_debugger_in_local_mode_is_no_hang(tmp_path):
    config = FailureConfig(hang_timeout_s=5)
    assert make_spec(2, tmp_path, failure_config=config).failures.hang_timeout_s == 5
    assert make_spec(0, tmp_path, failure_config=config).failures.hang_timeout_s is None


async def async_loop():
    pass


def generating_loop():
    yield 1


@pytest.mark.parametrize(
    ("loop", "message"), [(async_loop, r"asyncio\.run"), (generating_loop, "has a `yield`")]
)
def test_a_train_loop_that_a_call_does_not_run_is_refused(loop, message):
    for function in (loop, functools.partial(loop)):
        with pytest.raises(ValueError, match=message):
            DataParallelTrainer(function)


def test_a_train_loop_is_called_with_its_config():
    assert make_train_loop(lambda config: config["lr"], {"lr": 0.1})() == 0.1
    assert make_train_loop(lambda config=None: config, {"lr": 0.1})() == {"lr": 0.1}
    assert make_train_loop(functools.partial(lambda a, config: (a, config), 1), {"b": 2})() == (
        1,
        {"b": 2},
    )


def test_a_train_loop_without_a_config_gets_an_empty_one_if_it_needs_one():
    assert make_train_loop(lambda config: config, None)() == {}
    assert make_train_loop(lambda config=5: config, None)() == 5


def test_a_train_loop_may_take_nothing(caplog):
    assert make_train_loop(lambda: 7, None)() == 7
    assert make_train_loop(lambda: 7, {"lr": 0.1})() == 7
    assert "train_loop_config is not used" in caplog.text


def test_a_train_loop_with_two_required_parameters_is_refused():
    with pytest.raises(ValueError, match="takes 2 required parameters"):
        make_train_loop(lambda model, config: None, {})


def test_a_train_loop_that_is_no_function_is_refused():
    with pytest.raises(ValueError, match="must be a function"):
        TorchTrainer(3)


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("metadata", "set_metadata"),
        ("resume_from_checkpoint", "train_loop_config"),
        ("validation_config", "Validate in the train loop"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(argument, fix):
    with pytest.raises(TypeError, match=rf"TorchTrainer\({argument}=.*{fix}"):
        TorchTrainer(print, **{argument: {"train": 1}})
    TorchTrainer(print, **{argument: None})


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="unexpected argument 'num_worker'"):
        DataParallelTrainer(print, num_worker=2)


def test_a_config_in_the_wrong_place_is_refused():
    with pytest.raises(ValueError, match=r"scaling_config=.*ScalingConfig"):
        DataParallelTrainer(print, scaling_config=RunConfig())
    with pytest.raises(ValueError, match=r"torch_config='gloo' must be a .*TorchConfig"):
        TorchTrainer(print, torch_config="gloo")


def test_the_options_of_a_worker_follow_its_resources():
    resources = ScalingConfig(
        use_gpu=True,
        accelerator_type="A100",
        resources_per_worker={"CPU": 2, "GPU": 0.5, "memory": 1e9, "disk": 3},
    ).worker_resources
    options = worker_options(resources, None, 4, {"env_vars": {"A": "1"}}, ("torch",), ("jit",))
    strategy = options.pop("scheduling_strategy")
    assert strategy.placement_group_bundle_index == 4
    assert options == {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": 1_000_000_000,
        "resources": {"disk": 3},
        "runtime_env": {"env_vars": {"A": "1"}},
        "_preload": ["torch"],
        "_preload_later": ["jit"],
    }


def test_the_error_of_failed_workers_holds_their_exceptions():
    failures = {1: WorkerFailure.of(ValueError("bad"))}
    error = make_error(
        RunOutcome(RunState.ERRORED, message="[Rank 1] bad", worker_failures=failures)
    )
    assert isinstance(error, WorkerGroupError)
    assert isinstance(error, TrainingFailedError)
    assert isinstance(error.worker_failures[1], ValueError)
    assert "[Rank 1] bad" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert list(again.worker_failures) == [1]


def test_the_error_of_the_controller_holds_its_exception():
    failure = WorkerFailure.of(OSError("disk full"))
    error = make_error(RunOutcome(RunState.ERRORED, controller_failure=failure))
    assert isinstance(error, ControllerError)
    assert isinstance(error.controller_failure, OSError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_finished_run_has_no_error():
    assert make_error(RunOutcome(RunState.FINISHED)) is None


def test_an_exception_that_can_not_be_pickled_becomes_its_text():
    try:
        raise KeyError("boom", threading.Lock())
    except KeyError as error:
        failure = WorkerFailure.of(error)
    assert isinstance(failure.exception(), RuntimeError)
    assert "boom" in str(failure.exception())


def test_a_run_that_is_over_stays_over():
    with pytest.raises(RuntimeError, match="from FINISHED to RUNNING"):
        check_transition(RunState.FINISHED, RunState.RUNNING)
    assert RunState.ERRORED.terminal
    assert not RunState.RESTARTING.terminal


def test_progress_without_a_terminal_is_plain_lines():
    text = io.StringIO()
    display = PlainDisplay("run", text, ProgressMeter())
    row = Row(3, {"loss": 0.123456, "eval": {"n": 2}}, "checkpoint_000003")
    display.show(Progress(1, RunState.RUNNING, [], 0, []))
    display.show(Progress(2, RunState.RUNNING, [row], 4, ["Some note."]))
    assert text.getvalue().splitlines() == [
        "[run] training",
        "[run] Some note.",
        "[run] (4 more reports)",
        "[run] report 3: loss=0.1235 eval/n=2 -> checkpoint_000003",
    ]


class BrokenPipe(io.StringIO):
    """An output that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(text)

    def isatty(self) -> bool:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("output", [None, BrokenPipe()])
def test_an_output_that_can_not_be_written_to_does_not_end_a_run(output, monkeypatch):
    monkeypatch.setattr(sys, "stdout", output)
    display = make_display("run")
    display.show(Progress(1, RunState.RUNNING, [Row(0, {"loss": 0.5}, None)], 0, []))
    display.close()


def test_metrics_that_the_encoding_of_the_output_does_not_have_are_shown_escaped(monkeypatch):
    class AsciiTerminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", AsciiTerminal(content, encoding="ascii"))
    display = make_display("run")
    row = Row(0, {"note": "gr\u00f6\u00dfer"}, None)
    display.show(Progress(1, RunState.RUNNING, [row], 0, []))
    display.close()
    assert b"report 0: note=gr\\xf6\\xdfer (run)" in content.getvalue()


class ClosedTerminal(io.StringIO):
    """A terminal that is gone when something is to be written."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch):
    monkeypatch.setattr(sys, "stdout", ClosedTerminal())
    display = make_display("run")
    display.show(Progress(1, RunState.RUNNING, [Row(0, {"loss": 0.5}, "checkpoint")], 0, []))
    display.close()


class WithoutTransformers:
    """A finder of Python's imports on a machine without the library."""

    @staticmethod
    def find_spec(fullname: str, _path: object = None, _target: object = None) -> None:
        if fullname == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name=fullname)


def test_an_integration_whose_library_is_missing_says_what_to_install(monkeypatch):
    module = "miniray.train.huggingface.transformers"
    for loaded in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [WithoutTransformers, *sys.meta_path])
    with pytest.raises(ImportError, match=rf"{module} needs .*`pip install transformers`"):
        importlib.import_module(module)
