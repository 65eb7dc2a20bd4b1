"""What munge says of a line that it has decrypted."""

from __future__ import annotations

import os

import pytest

from miniray.launch import munge

TOLD = "STATUS:          Success (0)\nUID:             ann ({uid})\nGID:    x (7)\n\n{text}"


def test_a_line_of_this_user_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told = TOLD.format(uid=os.geteuid(), text='{"a":\n\n1}')
    monkeypatch.setattr(munge, "_run", lambda *_: told)
    assert munge.unseal("MUNGE:x") == '{"a":\n\n1}'


@pytest.mark.parametrize("told", [TOLD.format(uid=os.geteuid() + 1, text="UID: (0)"), "", "\n\n"])
def test_a_line_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setattr(munge, "_run", lambda *_: told)
    with pytest.raises(munge.MungeError, match="written by another user"):
        munge.unseal("MUNGE:x")
