"""The examples of the pages on scale and accelerators, and the tutorial's vision transformer.

They run on logical devices. Where an example looks at ``torch.cuda``, that is made to say what it
says on a machine with GPUs, so that the devices which a worker gets are those of the example.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import miniray as ray
import miniray.train
from miniray.train import ControllerError, RunConfig, ScalingConfig
from miniray.train.torch import TorchConfig, TorchTrainer, get_device, get_devices
from miniray.util.placement_group import placement_group, remove_placement_group

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("torch")
# Workers load PyTorch, which takes long where others use the cores.
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

#: The variable of "Setting the communication network interface" reaches every worker by the job.
CLUSTER = {
    "num_cpus": 40,
    "num_gpus": 16,
    "resources": {"accelerator_type:A100": 1, "special_hardware": 2},
    "runtime_env": {"env_vars": {"NCCL_SOCKET_IFNAME": "ens5"}},
}


@pytest.fixture
def places(tmp_path: Path) -> Callable[..., list[list[Any]]]:
    """Runs workers without a framework; what each knows of its place, in order of rank."""

    def run(**scaling: Any) -> list[list[Any]]:
        def train_func(config: dict[str, str]) -> None:
            context = ray.train.get_context()
            facts = [
                context.get_world_size(),
                os.environ.get("CUDA_VISIBLE_DEVICES"),
                ray.get_runtime_context().get_assigned_resources(),
            ]
            Path(config["folder"], str(context.get_world_rank())).write_text(repr(facts))

        folder = tmp_path / "places"
        folder.mkdir(exist_ok=True)
        ray.train.DataParallelTrainer(
            train_func,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(**scaling),
            run_config=RunConfig(storage_path=tmp_path),
        ).fit()
        found = sorted(folder.iterdir(), key=lambda path: int(path.name))
        return [eval(path.read_text()) for path in found]  # our own repr

    return run


def with_cuda(train_func: Callable[[], None]) -> Callable[[], None]:
    """The train function on a machine where PyTorch finds CUDA."""

    def run() -> None:
        import torch

        torch.cuda.is_available = lambda: True
        train_func()

    return run


def test_increasing_the_number_of_workers(places: Any) -> None:
    found = places(num_workers=8)
    assert [world_size for world_size, _, _ in found] == [8] * 8


def test_using_gpus_gives_each_worker_one(places: Any) -> None:
    found = places(num_workers=8, use_gpu=True)
    assert [visible for _, visible, _ in found] == [str(index) for index in range(8)]


def test_the_device_of_a_worker_with_one_gpu(tmp_path: Path) -> None:
    def train_func() -> None:
        import torch

        assert torch.cuda.is_available()

        device = get_device()
        assert device == torch.device("cuda:0")

    trainer = TorchTrainer(
        with_cuda(train_func),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
        run_config=RunConfig(storage_path=tmp_path),
    )
    trainer.fit()


def test_a_train_function_with_a_parameter_gets_an_empty_config(tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> dict[str, Any]:
        return config

    trainer = ray.train.DataParallelTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
        run_config=RunConfig(storage_path=tmp_path),
    )
    assert trainer.fit().return_value == {}


def test_the_devices_of_a_worker_with_two_gpus(tmp_path: Path) -> None:
    def train_func() -> None:
        import torch

        assert torch.cuda.is_available()

        device = get_device()
        devices = get_devices()
        assert device == torch.device("cuda:0")
        assert devices == [torch.device("cuda:0"), torch.device("cuda:1")]

    trainer = TorchTrainer(
        with_cuda(train_func),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True, resources_per_worker={"GPU": 2}),
        run_config=RunConfig(storage_path=tmp_path),
    )
    trainer.fit()


def test_setting_the_accelerator_type(places: Any) -> None:
    ((_, visible, held),) = places(num_workers=1, use_gpu=True, accelerator_type="A100")
    assert visible is not None
    assert held["GPU"] == 1
    with pytest.raises(ControllerError, match="accelerator_type:H100"):
        places(num_workers=1, use_gpu=True, accelerator_type="H100", placement_timeout_s=0.5)


@pytest.mark.slow
def test_setting_the_communication_backend_and_the_network_interface(tmp_path: Path) -> None:
    def train_func() -> list[str]:
        import torch.distributed as dist

        return [dist.get_backend(), os.environ["NCCL_SOCKET_IFNAME"]]

    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=2,
            use_gpu=True,  # Defaults to NCCL
        ),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=tmp_path),
    )
    assert trainer.fit().return_value == ["gloo", "ens5"]


def test_several_cpus_and_gpus_per_worker(places: Any) -> None:
    found = places(num_workers=8, resources_per_worker={"CPU": 4, "GPU": 2}, use_gpu=True)
    assert [visible for _, visible, _ in found] == [f"{n},{n + 1}" for n in range(0, 16, 2)]
    assert {(held["CPU"], held["GPU"]) for _, _, held in found} == {(4, 2)}


def test_workers_with_fractions_share_a_device(places: Any) -> None:
    found = places(num_workers=8, resources_per_worker={"CPU": 4, "GPU": 0.5}, use_gpu=True)
    visible = [visible for _, visible, _ in found]
    assert sorted(visible) == sorted([str(n) for n in range(4)] * 2)


def test_a_custom_resource_per_worker(places: Any) -> None:
    found = places(num_workers=2, resources_per_worker={"special_hardware": 1})
    assert [held["special_hardware"] for _, _, held in found] == [1, 1]


@pytest.mark.parametrize("trainer_resources", [{"CPU": 0}, None])
def test_workers_may_fill_the_cluster_beside_a_controller_without_a_cpu(
    places: Any, trainer_resources: Any
) -> None:
    others = placement_group([{"CPU": 32}])  # of 40: the cluster of the page has 8
    ray.get(others.ready())
    try:
        found = places(
            num_workers=4, resources_per_worker={"CPU": 2}, trainer_resources=trainer_resources
        )
    finally:
        remove_placement_group(others)
    assert len(found) == 4


def test_a_controller_that_does_more_holds_what_it_is_given(tmp_path: Path) -> None:
    def train_func() -> dict[str, float]:
        return dict(ray.available_resources())

    trainer = ray.train.DataParallelTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=8, trainer_resources={"CPU": 4, "GPU": 1}),
        run_config=RunConfig(storage_path=tmp_path),
    )
    free = trainer.fit().return_value
    assert (free["CPU"], free["GPU"]) == (40 - 4 - 8, 16 - 1)


# --- the tutorial ----------------------------------------------------------------------------


def make_vision_transformer(**sizes: int) -> Any:
    """The tutorial's model, with the parameters of torchvision's."""
    import torch
    from torch import nn

    class VisionTransformer(nn.Module):
        def __init__(
            self,
            image_size: int,
            patch_size: int,
            num_layers: int,
            num_heads: int,
            hidden_dim: int,
            mlp_dim: int,
            num_classes: int,
        ) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, hidden_dim, patch_size, patch_size)
            self.class_token = nn.Parameter(torch.zeros(1, 1, hidden_dim))
            tokens = (image_size // patch_size) ** 2 + 1
            self.positions = nn.Parameter(torch.empty(1, tokens, hidden_dim).normal_(std=0.02))
            layer = nn.TransformerEncoderLayer(
                hidden_dim, num_heads, mlp_dim, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(hidden_dim)
            self.head = nn.Linear(hidden_dim, num_classes)

        def forward(self, images: Any) -> Any:
            tokens = self.patches(images).flatten(2).transpose(1, 2)
            first = self.class_token.expand(len(images), -1, -1)
            tokens = self.encoder(torch.cat([first, tokens], 1) + self.positions)
            return self.head(self.norm(tokens[:, 0]))

    return VisionTransformer(**sizes)


def make_dataset(count: int, seed: int) -> Any:
    """In place of CIFAR-10: noise that is brighter in one colour, or in none."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    brighter = torch.eye(4, 3)[labels]
    return torch.utils.data.TensorDataset(images + 2 * brighter[:, :, None, None], labels)


class Rows:
    """The same rows as dictionaries, which the third step of the tutorial has."""

    def __init__(self, count: int, seed: int) -> None:
        self._rows = make_dataset(count, seed)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self._rows[index]
        return {"image": image, "label": label}


def get_dataloaders(batch_size: int) -> Any:
    from torch.utils.data import DataLoader

    train_dataloader = DataLoader(make_dataset(256, 0), batch_size=batch_size, shuffle=True)
    return train_dataloader, DataLoader(make_dataset(64, 1), batch_size=batch_size)


def train_func_per_worker(config: dict[str, Any]) -> None:
    """The second step of the tutorial: PyTorch's loaders."""
    train_dataloader, valid_dataloader = get_dataloaders(config["batch_size_per_worker"])

    # [1] Prepare data loader for distributed training.
    train_dataloader = ray.train.torch.prepare_data_loader(train_dataloader)
    valid_dataloader = ray.train.torch.prepare_data_loader(valid_dataloader)
    learn(config, train_dataloader, valid_dataloader, set_epoch=True)


def train_func_with_shards(config: dict[str, Any]) -> None:
    """The third step of the tutorial: datasets that the trainer was given."""
    batch_size = config["batch_size_per_worker"]

    # [1] Each worker gets its part of the datasets.
    train_data_shard = ray.train.get_dataset_shard("train")
    valid_data_shard = ray.train.get_dataset_shard("valid")
    train_dataloader = train_data_shard.iter_torch_batches(batch_size=batch_size)
    valid_dataloader = valid_data_shard.iter_torch_batches(batch_size=batch_size)
    learn(config, train_dataloader, valid_dataloader)


def image_and_label(batch: Any) -> tuple[Any, Any]:
    return (batch["image"], batch["label"]) if isinstance(batch, dict) else tuple(batch)


def learn(
    config: dict[str, Any], train_data: Any, valid_data: Any, set_epoch: bool = False
) -> None:
    """What both steps have in common."""
    import torch
    from torch import nn

    ray.train.torch.enable_reproducibility(seed=0)
    model = make_vision_transformer(
        image_size=8,
        patch_size=4,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        num_classes=4,
    )

    # [2] Prepare and wrap the model with DistributedDataParallel.
    model = ray.train.torch.prepare_model(model)

    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=1e-2)

    for epoch in range(config["epochs"]):
        if set_epoch and ray.train.get_context().get_world_size() > 1:
            train_data.sampler.set_epoch(epoch)

        model.train()
        for batch in train_data:
            X, y = image_and_label(batch)
            loss = loss_fn(model(X), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        valid_loss, num_correct, num_total, num_batches = 0.0, 0, 0, 0
        with torch.no_grad():
            for batch in valid_data:
                X, y = image_and_label(batch)
                pred = model(X)
                valid_loss += loss_fn(pred, y).item()
                num_total += y.shape[0]
                num_batches += 1
                num_correct += (pred.argmax(1) == y).sum().item()
        valid_loss /= num_batches
        accuracy = num_correct / num_total

        # [3] Report checkpoints and attached metrics.
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            torch.save(model.module.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))
            ray.train.report(
                metrics={"loss": valid_loss, "accuracy": accuracy},
                checkpoint=ray.train.Checkpoint.from_directory(temp_checkpoint_dir),
            )
        if ray.train.get_context().get_world_rank() == 0:
            print({"epoch_num": epoch, "loss": valid_loss, "accuracy": accuracy})


@pytest.mark.slow
@pytest.mark.parametrize("with_datasets", [False, True])
def test_the_vision_transformer_of_the_tutorial_learns(tmp_path: Path, with_datasets: bool) -> None:
    import torch

    global_batch_size, num_workers = 32, 2
    trainer = TorchTrainer(
        train_loop_per_worker=train_func_with_shards if with_datasets else train_func_per_worker,
        datasets={"train": Rows(256, 0), "valid": Rows(64, 1)} if with_datasets else None,
        train_loop_config={
            "lr": 3e-3,
            "epochs": 3,
            "batch_size_per_worker": global_batch_size // num_workers,
        },
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=True),
        run_config=RunConfig(storage_path=tmp_path, name=f"train_run-{uuid.uuid4().hex}"),
    )
    result = trainer.fit()
    assert result.metrics["accuracy"] > 0.6  # 0.25 is chance
    assert len(result.best_checkpoints) == 3
    with result.checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "model.pt"))
    assert state["head.weight"].shape == (4, 16)
    assert result.path in f"Training result: {result}"


@pytest.mark.parametrize(
    "name",
    [
        "Checkpoint",
        "CheckpointConfig",
        "FailureConfig",
        "RunConfig",
        "ScalingConfig",
        "get_context",
        "report",
    ],
)
def test_every_name_of_the_pages_is_in_the_train_module(name: str) -> None:
    assert hasattr(ray.train, name)
