"""What the tests of the torch layer share: a place in a group, and a session without a cluster."""

from __future__ import annotations

import contextlib

from miniray.train.base.ranks import Ranks
from miniray.train.storage.storage import RunStorage
from miniray.train.worker import context
from miniray.train.worker.backend import GroupMember
from miniray.train.worker.session import RankSession, SessionSetup


def member(**changes):
    values = {
        "ranks": Ranks(1, 4, 1, 2, 0),
        "address": "10.0.0.2",
        "master_address": "10.0.0.1",
        "master_port": 2000,
        "listener": None,
        "resources": {"CPU": 2},
        "node_devices": {},
        **changes,
    }
    return GroupMember(**values)


@contextlib.contextmanager
def session(folder, rank=0, world_size=1):
    """Makes this process a rank of a group of this size, without the others."""
    setup = SessionSetup(RunStorage(folder, "run"), "token", 1, 0, None)
    context.set_session(RankSession(setup, Ranks(rank, world_size, rank, world_size, 0), None))
    try:
        yield
    finally:
        context.set_session(None)
