"""Worker groups in the test's own process, for tests of the controller: ranks are coroutines."""

from __future__ import annotations

import asyncio
import pickle

from miniray.exceptions import ActorDiedError
from miniray.train.base.exceptions import WorkerFailure
from miniray.train.base.reports import Report, Upload
from miniray.train.storage.storage import default_checkpoint_name
from miniray.train.worker.worker import WorkerOutcome


class Rank:
    """What the train loop of a test can do on one rank."""

    def __init__(self, rank, setup, controller):
        self.rank = rank
        self.setup = setup
        self.controller = controller
        self.index = 0

    async def call(self, method, *arguments):
        return await self.controller.call(method, self.setup.attempt, self.rank, *arguments)

    async def report(self, metrics, files=None):
        upload = None
        if files is not None:
            name = default_checkpoint_name(self.setup.first_number + self.index)
            folder = f"{self.setup.storage.path}/{name}"
            self.setup.storage.filesystem.makedirs(folder, exist_ok=True)
            for file, text in files.items():
                self.setup.storage.filesystem.pipe_file(f"{folder}/{file}", text.encode())
            upload = Upload(name, {file: len(text) for file, text in files.items()})
        report = Report(metrics, upload)
        await self.call("report", self.index, report)
        self.index += 1


class FakeGroup:
    """A worker group whose ranks run ``loop`` as coroutines."""

    def __init__(self, size, groups):
        self.size = size
        self.groups = groups
        self.stopped = None
        self.infos = []
        self.ended = []
        groups.append(self)

    async def place(self):
        pass

    async def start(self, carrier, attempt):
        if self.start_error is not None:
            raise self.start_error

    start_error = None

    async def storage_problems(self, storage, token):
        problem = storage.problem_here(token, writes=True)
        return dict.fromkeys(range(self.size), problem) if problem else {}

    def run(self, loop, setup, carrier):
        return [self._run(loop, Rank(rank, setup, carrier)) for rank in range(self.size)]

    async def _run(self, loop, rank):
        try:
            value = await loop(rank)
        except ActorDiedError:
            raise
        except Exception as error:
            return WorkerOutcome(failure=WorkerFailure.of(error))
        return WorkerOutcome(value=pickle.dumps(value))

    def stacks(self, ranks):
        return {rank: f"MainThread:\n  loop of rank {rank}\n" for rank in ranks}

    def reserve_beside(self, number):
        raise NotImplementedError

    async def end_rank(self, rank):
        self.ended.append(rank)

    async def stop(self, *, graceful):
        self.stopped = graceful


def run(controller, loop):
    return asyncio.run(controller.run(controller, [loop]))


async def return_at_once(rank):
    return None
