"""The session of a rank: where its reports go and what it was given.

A report is sent and not waited for. It waits only for the upload of the rank's
own files, and when the rank is far ahead of the controller.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
from typing import TYPE_CHECKING, Any

from miniray.train.checkpoint import Checkpoint
from miniray.train.reports import Report
from miniray.train.storage import default_checkpoint_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.ranks import Ranks
    from miniray.train.storage import RunStorage

#: So many reports of a rank may be on their way before it waits for the controller.
REPORT_WINDOW = 1000


@dataclasses.dataclass(frozen=True)
class SessionSetup:
    """What the controller gives a rank for one attempt.

    Attributes:
        storage: The run's folder.
        token: What the run's facts in the storage must hold, to prove it is the same folder.
        attempt: Number of the attempt.
        first_number: Number of the first report among all reports of the run.
        checkpoint: Where to begin from; None at the beginning.
        controller: Handle of the controller.
    """

    storage: RunStorage
    token: str
    attempt: int
    first_number: int
    checkpoint: Checkpoint | None
    controller: Any


class Session:
    """A rank's side of an attempt. Thread-safe."""

    def __init__(self, setup: SessionSetup, ranks: Ranks) -> None:
        self.storage = setup.storage
        self.checkpoint = setup.checkpoint
        self.ranks = ranks
        self._setup = setup
        self._lock = threading.Lock()
        self._reported = 0
        self._unconfirmed: collections.deque[Any] = collections.deque()

    def check_storage(self) -> None:
        """Raise RuntimeError if this process sees another folder than the controller does."""
        if self.storage.run_facts().get("token") != self._setup.token:
            raise RuntimeError(
                f"The storage path {self.storage.path} is not shared by the machines of this run: "
                f"rank {self.ranks.world_rank} does not find there what the controller wrote. Set "
                f"RunConfig(storage_path=...) to a network folder or URL that all machines reach."
            )

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        checkpoint_dir_name: str | None,
    ) -> None:
        """Upload the checkpoint if there is one, then send the report."""
        plain = plain_metrics(metrics)
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"report() got the checkpoint {checkpoint!r}. "
                f"Pass miniray.train.Checkpoint.from_directory(path)."
            )
        with self._lock:
            number = self._setup.first_number + self._reported
            upload = None
            if checkpoint is not None:
                name = checkpoint_dir_name or default_checkpoint_name(number)
                upload = self.storage.upload(checkpoint, name)
                self.checkpoint = self.storage.checkpoint(name)
            self._unconfirmed.append(
                self._setup.controller.report.remote(
                    self._setup.attempt,
                    self.ranks.world_rank,
                    self._reported,
                    Report(plain, upload),
                )
            )
            self._reported += 1
            if len(self._unconfirmed) > REPORT_WINDOW:
                self._confirm(self._unconfirmed.popleft())

    def flush(self) -> None:
        """Wait until the controller has every report."""
        with self._lock:
            while self._unconfirmed:
                self._confirm(self._unconfirmed.popleft())

    @staticmethod
    def _confirm(ref: Any) -> None:
        import miniray

        miniray.get(ref)


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with NumPy numbers as Python ones.

    Raises:
        TypeError: They are not a dictionary with string keys.
        ValueError: They hold a tensor.
    """
    if not hasattr(metrics, "items"):
        raise TypeError(
            f"report() got metrics of type {type(metrics).__name__}; "
            f'metrics are a dictionary, such as {{"loss": 0.1}}.'
        )
    plain = {}
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"report() got the key {key!r}; keys of metrics are strings.")
        plain[key] = _plain(key, value)
    return plain


def _plain(key: str, value: Any) -> Any:
    if type(value) in (int, float, str, bool, type(None)):
        return value
    if isinstance(value, dict):
        # JSON has only string keys.
        return {str(name): _plain(f"{key}/{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    # What was never imported can't be the type of a value.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if torch is not None and isinstance(value, torch.Tensor):
        raise ValueError(
            f"report() got a tensor as the metric {key!r}. Report a number "
            f"(`{key.rsplit('/', 1)[-1]}.item()`), or save the tensor in a checkpoint."
        )
    return value
