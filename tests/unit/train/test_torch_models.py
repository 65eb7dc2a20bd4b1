from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch_helpers import session  # noqa: E402

from miniray.common.series import Series, how_many  # noqa: E402
from miniray.train.torch import (  # noqa: E402
    enable_reproducibility,
    get_device,
    get_devices,
    models,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from miniray.train.torch.models import layers_of  # noqa: E402


@pytest.fixture
def alone(tmp_path):
    """This process is the only rank."""
    with session(tmp_path):
        yield


# --- devices -------------------------------------------------------------------------------------


def test_a_worker_without_gpus_trains_on_the_cpu(alone):
    assert get_devices() == [torch.device("cpu")]
    assert get_device() == torch.device("cpu")


@pytest.mark.parametrize("function", [get_device, get_devices])
def test_outside_a_train_loop_there_is_no_device(function):
    message = rf"train\.torch\.{function.__name__}\(\) works only inside a train loop"
    with pytest.raises(RuntimeError, match=message):
        function()


# --- models --------------------------------------------------------------------------------------


def test_what_is_no_model_is_refused(alone):
    with pytest.raises(TypeError, match=r"prepare_model\(\) takes a torch\.nn\.Module, not 3"):
        prepare_model(3)


def test_outside_a_train_loop_nothing_can_be_prepared():
    loader = torch.utils.data.DataLoader(range(2))
    prepared = {prepare_model: torch.nn.Linear(1, 1), prepare_data_loader: loader}
    for function, given in prepared.items():
        message = rf"train\.torch\.{function.__name__}\(\) works only inside a train loop"
        with pytest.raises(RuntimeError, match=message):
            function(given)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", None])
def test_the_model_of_a_single_worker_is_not_wrapped(alone, strategy):
    model = torch.nn.Linear(2, 2)
    assert prepare_model(model, parallel_strategy=strategy) is model


def test_a_model_can_be_moved_to_a_device_of_ones_own(alone):
    assert prepare_model(torch.nn.Linear(2, 2), torch.device("meta")).weight.is_meta


def test_a_model_can_stay_where_it_is(alone):
    model = torch.nn.Linear(2, 2, device="meta")
    assert prepare_model(model, move_to_device=False) is model


def test_a_strategy_that_does_not_exist_is_refused(alone):
    with pytest.raises(ValueError, match="ddp, fsdp, fsdp2, or None"):
        prepare_model(torch.nn.Linear(2, 2), parallel_strategy="DDP")


def test_arguments_of_no_strategy_are_refused(alone):
    with pytest.raises(ValueError, match="no parallel_strategy_kwargs such as 'mesh'"):
        prepare_model(torch.nn.Linear(2, 2), True, None, {"mesh": 1})


def test_the_older_fsdp_needs_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with session(tmp_path, world_size=2), pytest.raises(RuntimeError, match="'fsdp2' or 'ddp'"):
        prepare_model(torch.nn.Linear(2, 2), parallel_strategy="fsdp")


def test_inner_layers_are_sharded_before_those_that_contain_them():
    inner = torch.nn.Linear(1, 1)
    middle = torch.nn.Sequential(inner, torch.nn.ReLU())
    model = torch.nn.Sequential(middle, torch.nn.Linear(1, 1))
    classes = (torch.nn.Sequential, torch.nn.Linear)
    assert layers_of(model, classes) == [model[1], inner, middle]
    assert layers_of(model, ()) == []


def test_a_layer_class_that_the_model_does_not_have_is_named():
    with pytest.raises(ValueError, match="Linear has no such submodule"):
        layers_of(torch.nn.Linear(1, 1), (torch.nn.Conv2d,))


# --- optimizers ---------------------------------------------------------------------------------


def test_steps_of_an_optimizer_are_counted_and_timed_once(alone, monkeypatch):
    counted = Series()
    monkeypatch.setattr(models, "COUNTED", counted)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    for _ in range(2):
        assert prepare_optimizer(optimizer) is optimizer
    for _ in range(3):
        optimizer.step()
    found = {name: values for _, name, _, _, _, values in counted.rows()}
    assert found["train_steps_total"] == [3.0]
    assert how_many(found["train_step_seconds"]) == 2


# --- reproducibility -----------------------------------------------------------------------------


@pytest.fixture
def restored(monkeypatch):
    """Undoes what is global."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = before


def test_the_same_seed_gives_the_same_numbers(restored):
    np = pytest.importorskip("numpy")
    import random

    def draw():
        return random.random(), np.random.random(), torch.rand(1).item()

    enable_reproducibility(7)
    first = draw()
    assert draw() != first
    enable_reproducibility(7)
    assert draw() == first
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "1"])
def test_a_seed_that_numpy_would_refuse_is_refused(seed):
    with pytest.raises(ValueError, match="0 to"):
        enable_reproducibility(seed)
