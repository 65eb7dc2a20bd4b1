"""A rank of local mode that is not rank 0."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from miniray.train.base.exceptions import ControllerLostError, StorageNotSharedError
from miniray.train.base.ranks import Ranks
from miniray.train.run import local


def test_a_rank_whose_own_failure_comes_after_the_end_of_rank_0_raises_its_own() -> None:
    storage = SimpleNamespace(run_facts=dict, storage_fs_path="/elsewhere")

    def ask(kind: str, *_: object) -> Future[Any]:
        if kind != "setup":
            raise ControllerLostError("rank 0 is gone")
        answer: Future[Any] = Future()
        answer.set_result(SimpleNamespace(storage=storage, token="other"))
        return answer

    backend, config = SimpleNamespace(), SimpleNamespace(logging_config=None)
    spec: Any = SimpleNamespace(storage=storage, backend=backend, run_config=config)
    place: Any = SimpleNamespace(ranks=Ranks(1, 2, 1, 2, 0))
    link: Any = SimpleNamespace(ask=ask)
    ended = local._follow(spec, lambda: None, place, link)  # type: ignore[arg-type]
    assert isinstance(ended.error, StorageNotSharedError)
