"""Train a tiny BERT with Hugging Face Transformers on two workers, on the CPU.

The model is made from a configuration and the sequences are made up, so nothing is downloaded:
the model learns which of two tokens a sequence has more of. The trainer is Transformers' own; a
callback reports its metrics and checkpoints:

    pip install 'miniray[train,huggingface]'
    python examples/train_transformers.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import miniray
from miniray import train
from miniray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from miniray.train.torch import TorchTrainer


def make_sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of nine tokens, 1 or 2 each; the label says whether most are 2."""
    tokens = torch.randint(1, 3, (count, 9), generator=torch.Generator().manual_seed(seed))
    labels = (tokens.float().mean(1) > 1.5).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def make_model() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=3,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
        )
    )


def accuracy(prediction) -> dict[str, float]:
    """What Transformers reports as ``eval_accuracy``."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def train_loop(config: dict) -> None:
    """What every worker runs; the trainer gives each its share of the sequences."""
    torch.manual_seed(0)
    checkpoint = train.get_checkpoint()  # after a failure, or of an earlier run of this name
    resume = None
    if checkpoint is not None:
        resume = Path(checkpoint.to_directory(), RayTrainReportCallback.CHECKPOINT_NAME)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=make_model(),
            args=TrainingArguments(
                output_dir=folder,  # the callback takes checkpoints from here
                num_train_epochs=config["epochs"],
                per_device_train_batch_size=16,
                learning_rate=2e-3,
                eval_strategy="epoch",
                save_strategy="epoch",
                logging_strategy="epoch",
                report_to=[],
                use_cpu=not config["use_gpu"],
                disable_tqdm=True,
                ddp_find_unused_parameters=False,
            ),
            train_dataset=make_sequences(config["sequences"], seed=0),
            eval_dataset=make_sequences(200, seed=1),
            compute_metrics=accuracy,
            callbacks=[RayTrainReportCallback()],
        )
        prepare_trainer(trainer).train(resume_from_checkpoint=resume)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--storage-path", default=None, help="folder for the run's results")
    arguments = parser.parse_args()

    miniray.init("local", num_cpus=arguments.workers)
    result = TorchTrainer(
        train_loop,
        train_loop_config={
            "epochs": arguments.epochs,
            "sequences": arguments.sequences,
            "use_gpu": arguments.use_gpu,
        },
        scaling_config=train.ScalingConfig(
            num_workers=arguments.workers, use_gpu=arguments.use_gpu
        ),
        run_config=train.RunConfig(
            storage_path=arguments.storage_path,
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="eval_accuracy"
            ),
        ),
    ).fit()

    best = result.get_best_checkpoint("eval_accuracy", "max")
    with best.as_directory() as folder:
        path = Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)
        model = BertForSequenceClassification.from_pretrained(path).eval()
    for text in ("1 2 1 1 2 1 1 2 1", "2 2 1 2 1 2 2 1 2"):
        tokens = torch.tensor([[int(token) for token in text.split()]])
        print(f"{text}: more of {model(tokens).logits.argmax().item() + 1}")
    print(f"accuracy {result.metrics['eval_accuracy']:.2f}")
    print(f"best checkpoint {best.path}")
    miniray.shutdown()


if __name__ == "__main__":
    main()
