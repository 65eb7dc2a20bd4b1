from __future__ import annotations

import pytest
from task_world import TaskWorld


@pytest.fixture
def world() -> TaskWorld:
    return TaskWorld()
