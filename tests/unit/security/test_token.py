from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray.security.token import (
    JoinToken,
    TokenError,
    derive_key,
    make_secret,
    parse_token,
    read_token_file,
    write_token_file,
)

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = JoinToken(fingerprint=bytes(range(32)), secret=bytes(range(32, 64)))
SECRET_TEXT = str(TOKEN).split(".")[2]


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_token_is_read_as_it_was_written(fingerprint: bytes, secret: bytes) -> None:
    token = JoinToken(fingerprint, secret)
    assert parse_token(f"  {token}\n") == token


def test_a_token_is_safe_to_paste_into_a_shell() -> None:
    text = str(TOKEN)
    assert text.startswith("mr1.")
    assert all(c.isalnum() or c in "._-" for c in text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        (SECRET_TEXT, "begins with 'mr1.'"),
        (f"mr2.{SECRET_TEXT}.{SECRET_TEXT}", "begins with 'mr1.'"),
        (f"mr1.{SECRET_TEXT}", "has 2"),
        (f"{TOKEN}.{SECRET_TEXT}", "has 4"),
        (str(TOKEN)[:-4], "third part of the join token is cut"),
        (f"{TOKEN}{SECRET_TEXT}", "third part of the join token is too long"),
        (f"mr1.%%%.{SECRET_TEXT}", "second part of the join token has characters"),
    ],
)
def test_a_text_that_is_no_token_is_refused_with_what_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(TokenError, match=complaint) as caught:
        parse_token(text)
    assert SECRET_TEXT[:-4] not in str(caught.value)


def test_no_representation_shows_the_secret() -> None:
    assert SECRET_TEXT not in repr(TOKEN)
    assert repr(TOKEN.secret) not in repr(TOKEN)


def test_derivation_is_the_hkdf_of_rfc_5869() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    expected = HKDF(SHA256(), 32, salt=None, info=b"purpose").derive(TOKEN.secret)
    assert derive_key(TOKEN.secret, b"purpose") == expected


def test_every_use_has_a_key_of_its_own() -> None:
    keys = {TOKEN.socket_key.hex(), TOKEN.grpc_secret, TOKEN.secret.hex()}
    assert len(keys) == 3
    assert all(len(key) == 64 for key in keys)


def test_secrets_are_32_fresh_bytes() -> None:
    assert len(make_secret()) == 32
    assert make_secret() != make_secret()


def test_a_token_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    previous = os.umask(0)
    try:
        write_token_file(path, TOKEN)
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token_file(path) == TOKEN
    assert list(tmp_path.iterdir()) == [path]


def test_a_bad_token_file_is_named_without_its_text(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(TokenError, match=f"{path} cannot be read: No such file"):
        read_token_file(path)
    path.write_text("hunter2")
    with pytest.raises(TokenError, match=str(path)) as caught:
        read_token_file(path)
    assert "hunter2" not in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TokenError, match="holds no join token"):
        read_token_file(path)
