"""What a rank's process may still be needed for when its train loop has returned."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fake_runtime import FakeRuntime, fake_runtime

from miniray.client.cluster_runtime import FUTURE_THREAD
from miniray.train.worker.backend import Backend
from miniray.train.worker.worker import TrainWorker

if TYPE_CHECKING:
    import pytest


def test_threads_of_the_train_loop_may_serve_others_and_those_of_miniray_do_not() -> None:
    over = threading.Event()
    futures = ThreadPoolExecutor(1, FUTURE_THREAD)
    with fake_runtime():
        futures.submit(lambda: None).result(30)
        assert not TrainWorker(Backend()).serves_others()
        server = threading.Thread(target=over.wait)
        server.start()
        assert TrainWorker(Backend()).serves_others()
        over.set()
        server.join()
        assert not TrainWorker(Backend()).serves_others()
    futures.shutdown()


def test_actors_that_end_with_a_rank_may_serve_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_runtime():
        monkeypatch.setattr(FakeRuntime, "owns_actors", lambda _: True)
        assert TrainWorker(Backend()).serves_others()
