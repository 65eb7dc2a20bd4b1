"""Code and packages travel whole, or in pieces that can be put together again."""

from __future__ import annotations

import pytest

from miniray.messages.protocol import pieces, split, whole


@pytest.mark.parametrize("size", [0, 9, 10, 11, 20, 21])
def test_what_is_split_can_be_put_together_again(size: int) -> None:
    content = bytes(range(size))
    parts = list(split(b"name", content, piece=10))
    assert parts[-1][0] == b"name"  # it is known only when all of it is there
    kept = dict(parts)
    names = pieces(b"name", kept[b"name"])
    assert {b"name", *names} == kept.keys()
    assert (b"".join(kept[name] for name in names) if names else whole(kept[b"name"])) == content
    assert all(len(part) <= 11 for part in kept.values())
