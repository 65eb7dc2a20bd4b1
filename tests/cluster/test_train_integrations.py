"""Lightning, Transformers and Hugging Face datasets with two real workers and tiny models."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from miniray import train
from miniray.train import CheckpointUploadMode, WorkerGroupError
from miniray.train.torch import TorchTrainer

pytest.importorskip("torch")


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    """Skip where the extra is not installed; one that is installed and broken fails."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} comes with the extra {extra!r}")


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]


@pytest.fixture
def fit(fit: Any, tmp_path: Path) -> Any:
    """Runs a train loop on two workers with a process group."""

    def run(loop: Any, config: Any = None, **given: Any) -> Any:
        config = {"folder": str(tmp_path), **(config or {})}
        return fit(loop, config, trainer=TorchTrainer, given=given)

    return run


def lightning_loop(config: dict[str, Any]) -> dict[str, Any]:
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from miniray.train.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[float] = []

        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            self.seen += x.flatten().tolist()
            loss = torch.nn.functional.mse_loss(self.layer(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    x = torch.arange(8.0).unsqueeze(1)
    model = Model()
    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=config["epochs"],
            accelerator="cpu",
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback(config.get("mode"))],
            default_root_dir=config["folder"],
            enable_checkpointing=False,
            enable_progress_bar=False,
            logger=False,
        )
    )
    resume = None
    if config.get("resume"):
        resume = os.path.join(config["resume"], RayTrainReportCallback.CHECKPOINT_NAME)
    trainer.fit(model, DataLoader(TensorDataset(x, 2 * x), batch_size=2), ckpt_path=resume)
    return {
        "world": (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank),
        "rows": len(model.seen),
        "epoch": trainer.current_epoch,
        "device": str(trainer.strategy.root_device),
    }


@needs("lightning", "lightning")
def test_lightning_trains_over_the_worker_group_and_goes_on(fit: Any) -> None:
    result = fit(lightning_loop, {"epochs": 2})
    assert result.return_value["world"] == (2, 0, 0, 0)
    assert result.return_value["device"] == "cpu"
    assert result.return_value["rows"] == 8  # half of 8 in each epoch
    assert result.metrics["epoch"] == 1
    assert result.metrics["step"] == 4
    assert result.metrics["loss"] > 0
    assert len(result.best_checkpoints) == 2
    with result.checkpoint.as_directory() as folder:
        again = fit(lightning_loop, {"epochs": 3, "resume": folder})
    assert again.return_value["epoch"] == 3
    assert [metrics["epoch"] for _, metrics in again.best_checkpoints] == [2]


@needs("lightning", "lightning")
def test_the_checkpoints_of_lightning_can_be_uploaded_while_it_goes_on(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, Any]) -> None:
        tempfile.tempdir = config["scratch"]
        lightning_loop(config)

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    mode = CheckpointUploadMode.ASYNC
    result = fit(loop, {"epochs": 2, "mode": mode, "scratch": str(scratch)})
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1]
    for checkpoint, _ in result.best_checkpoints:
        assert [file.name for file in Path(checkpoint.path).iterdir()] == ["checkpoint.ckpt"]
    assert list(scratch.iterdir()) == []  # deleted, on both ranks


@needs("lightning", "lightning")
def test_what_the_callback_of_lightning_can_not_do_is_refused() -> None:
    from miniray.train.lightning import RayTrainReportCallback

    with pytest.raises(ValueError, match=r"NO_UPLOAD\) makes no sense.*Use SYNC or ASYNC"):
        RayTrainReportCallback(CheckpointUploadMode.NO_UPLOAD)
    with pytest.raises(ValueError, match=r"CheckpointUploadMode\.SYNC"):
        RayTrainReportCallback("ASYNC")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"RayTrainReportCallback\(validation=\.\.\.\)"):
        RayTrainReportCallback(validation=True)


@needs("lightning", "lightning")
@pytest.mark.parametrize("name", ["RayDDPStrategy", "RayFSDPStrategy"])
def test_each_lightning_strategy_takes_device_and_share_of_the_data_from_the_group(
    fit: Any, name: str
) -> None:
    def loop(config: dict[str, Any]) -> list[Any]:
        from miniray.train import lightning

        strategy = getattr(lightning, config["strategy"])(
            cluster_environment=lightning.RayLightningEnvironment()
        )
        kwargs = strategy.distributed_sampler_kwargs
        return [str(strategy.root_device), kwargs, strategy.world_size]

    found = fit(loop, {"strategy": name}).return_value
    assert found == ["cpu", {"num_replicas": 2, "rank": 0}, 2]


@needs("lightning", "lightning")
def test_the_names_of_lightning_are_those_of_ray_too() -> None:
    from miniray.train import lightning

    names = {
        "MinirayDDPStrategy": "RayDDPStrategy",
        "MinirayDeepSpeedStrategy": "RayDeepSpeedStrategy",
        "MinirayFSDPStrategy": "RayFSDPStrategy",
        "MinirayLightningEnvironment": "RayLightningEnvironment",
        "MinirayTrainReportCallback": "RayTrainReportCallback",
    }
    for ours, rays in names.items():
        assert getattr(lightning, ours) is getattr(lightning, rays)


@needs("lightning", "lightning")
def test_the_deepspeed_strategy_without_deepspeed_says_what_is_missing() -> None:
    import lightning.pytorch as pl

    from miniray.train.lightning import RayDeepSpeedStrategy

    assert issubclass(RayDeepSpeedStrategy, pl.strategies.DeepSpeedStrategy)
    if importlib.util.find_spec("deepspeed") is None:
        with pytest.raises(Exception, match="you must have DeepSpeed installed"):
            RayDeepSpeedStrategy()


@needs("transformers", "huggingface")
def test_the_callback_of_transformers_has_both_names() -> None:
    from miniray.train.huggingface import transformers

    assert transformers.MinirayTrainReportCallback is transformers.RayTrainReportCallback


@needs("lightning", "lightning")
def test_a_lightning_trainer_that_does_not_know_the_group_is_refused(fit: Any) -> None:
    def loop(config: dict[str, Any]) -> None:
        import lightning.pytorch as pl

        from miniray.train.lightning import RayDDPStrategy, prepare_trainer

        options = {"accelerator": "cpu", "logger": False, "default_root_dir": config["folder"]}
        with pytest.raises(RuntimeError, match="RayLightningEnvironment"):
            prepare_trainer(pl.Trainer(strategy=RayDDPStrategy(), **options))
        prepare_trainer(pl.Trainer(strategy="ddp", **options))

    with pytest.raises(WorkerGroupError, match="strategy of the Lightning trainer is DDPStrategy"):
        fit(loop)


def transformers_loop(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from miniray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
    )
    if config["shards"]:
        data: Any = train.get_dataset_shard("train").iter_torch_batches(batch_size=2)
    else:
        data = [
            {"input_ids": torch.tensor([n % 20, 1, 2]), "labels": torch.tensor(n % 2)}
            for n in range(16)
        ]
    arguments = TrainingArguments(
        output_dir=os.path.join(config["folder"], "output"),
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=2,
        save_strategy="epoch",
        logging_strategy="epoch",
        eval_strategy="epoch" if "eval" in config else "no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = prepare_trainer(
        Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=config.get("eval"),
            callbacks=[RayTrainReportCallback()],
        )
    )
    resume = None
    if config.get("resume"):
        resume = os.path.join(config["resume"], RayTrainReportCallback.CHECKPOINT_NAME)
    trainer.train(resume_from_checkpoint=resume)
    return {"world": arguments.world_size, "step": trainer.state.global_step}


@needs("transformers", "huggingface")
@pytest.mark.parametrize("shards", [False, True])
def test_transformers_trains_over_the_worker_group_and_goes_on(fit: Any, shards: bool) -> None:
    import pyarrow as pa

    table = pa.table({"input_ids": [[n, 1, 2] for n in range(16)], "labels": [0, 1] * 8})
    datasets = {"train": table} if shards else None
    result = fit(transformers_loop, {"epochs": 2, "shards": shards}, datasets=datasets)
    assert result.return_value == {"world": 2, "step": 8}
    assert result.metrics["step"] == 8
    assert result.metrics["epoch"] == 2
    assert result.metrics["loss"] > 0
    assert len(result.best_checkpoints) == 2
    with result.checkpoint.as_directory() as folder:
        files = {path.name for path in Path(folder, "checkpoint").iterdir()}
        assert {"model.safetensors", "trainer_state.json"} <= files
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= files
        again = fit(
            transformers_loop, {"epochs": 3, "shards": shards, "resume": folder}, datasets=datasets
        )
    assert again.return_value["step"] == 12
    assert [metrics["step"] for _, metrics in again.best_checkpoints] == [12]


@needs("transformers", "huggingface")
def test_a_transformers_trainer_evaluates_on_several_shards_by_name(fit: Any) -> None:
    import pyarrow as pa

    def loop(config: dict[str, Any]) -> Any:
        shards = {
            name: train.get_dataset_shard(name).iter_torch_batches(batch_size=2)
            for name in ("easy", "hard")
        }
        return transformers_loop({**config, "eval": shards})

    def table(rows: int) -> Any:
        ids = [[n % 20, 1, 2] for n in range(rows)]
        return pa.table({"input_ids": ids, "labels": [0, 1] * (rows // 2)})

    datasets = {"train": table(16), "easy": table(8), "hard": table(12)}
    result = fit(loop, {"epochs": 1, "shards": True}, datasets=datasets)
    assert {"eval_easy_loss", "eval_hard_loss"} <= set(result.metrics)


@needs("datasets", "huggingface")
def test_hugging_face_datasets_are_split_over_the_workers(fit: Any, tmp_path: Path) -> None:
    import datasets as hf

    def loop(config: dict[str, Any]) -> None:
        rank = train.get_context().get_world_rank()
        for name in ("plain", "streamed", "decoded"):
            rows = [
                row
                for batch in train.get_dataset_shard(name).iter_batches(batch_size=3)
                for row in zip(batch["id"].tolist(), batch["text"].tolist(), strict=True)
            ]
            Path(config["folder"], f"{name}{rank}").write_text(repr(rows))

    columns = {"id": list(range(11)), "text": [f"text {n}" for n in range(11)]}
    plain = hf.Dataset.from_dict(columns)
    decoded = plain.with_transform(
        lambda batch: {**batch, "text": [t.upper() for t in batch["text"]]}
    )
    fit(
        loop, datasets={"plain": plain, "streamed": plain.to_iterable_dataset(), "decoded": decoded}
    )
    for name in ("plain", "streamed", "decoded"):
        rows = [row for rank in range(2) for row in eval((tmp_path / f"{name}{rank}").read_text())]
        text = "TEXT" if name == "decoded" else "text"
        assert sorted(rows) == [(n, f"{text} {n}") for n in range(11)]


@needs("datasets", "huggingface")
def test_a_dictionary_of_hugging_face_datasets_is_refused_with_what_to_do() -> None:
    import datasets as hf

    splits = hf.DatasetDict({"train": hf.Dataset.from_dict({"id": [1]})})
    with pytest.raises(ValueError, match=r"holds several datasets \(train\).*dict\(dataset\)"):
        TorchTrainer(print, datasets={"train": splits})
