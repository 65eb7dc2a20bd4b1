"""The cluster's one secret: how it is made, kept, shown as a join token and derived from.

Nothing is authenticated with the secret itself. Each use has a key of its own, so that a key shown
to one kind of peer is useless elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hmac
import os
from pathlib import Path

#: Environment variable that a token can be given in: command lines are seen by other users.
TOKEN_VARIABLE = "MINIRAY_TOKEN"  # noqa: S105 - a name, not a token
#: One that names the file which has it.
TOKEN_FILE_VARIABLE = "MINIRAY_TOKEN_FILE"  # noqa: S105
SECRET_SIZE = 32
FINGERPRINT_SIZE = 32
_PREFIX = "mr1"
_HOW = "Copy the whole token that `miniray start --head` printed."
#: Purposes that keys are derived for.
_SOCKET = b"miniray unix socket challenge 1"
_GRPC = b"miniray grpc metadata 1"
_MEMBERS = b"miniray members' authority 1"
_WEB = b"miniray web 1"


#: The token that this process was given in its environment, once it was needed.
_given: str | None = None


class TokenError(ValueError):
    """A text is not a join token. The message says what is wrong with it and never shows it."""


@dataclasses.dataclass
class JoinToken:
    """What a machine needs to join a cluster and to verify that it is the right one."""

    #: SHA-256 of the head's certificate (DER).
    fingerprint: bytes
    secret: bytes = dataclasses.field(repr=False)

    def __str__(self) -> str:
        """The text that users pass on: ``mr1.<fingerprint>.<secret>``."""
        return f"{_PREFIX}.{_encode(self.fingerprint)}.{_encode(self.secret)}"

    @property
    def socket_key(self) -> bytes:
        """Key of the challenge on Unix sockets (see ``challenge.py``)."""
        return derive_key(self.secret, _SOCKET)

    @property
    def grpc_secret(self) -> str:
        """What a peer shows in the metadata of every RPC."""
        return derive_key(self.secret, _GRPC).hex()

    @property
    def members_key(self) -> bytes:
        """What the key of the members' authority is made of (see ``certificates.py``)."""
        return derive_key(self.secret, _MEMBERS)

    @property
    def web_key(self) -> bytes:
        """What the tokens and cookies of the page are made of; no browser ever has it."""
        return derive_key(self.secret, _WEB)


def web_token(key: bytes, use: str) -> str:
    """Return the bearer token for the page's port: to use it as "api", or to read "metrics"."""
    return derive_key(key, f"token for {use}".encode()).hex()


def take_token() -> str | None:
    """Return the token of the environment, and take it out of there: children would inherit it.

    Later calls return it again, so that a program can attach again.

    Raises:
        TokenError: The file that has it cannot be read.
    """
    global _given
    file = os.environ.pop(TOKEN_FILE_VARIABLE, None)
    told = str(read_token_file(Path(file))) if file else None
    _given = os.environ.pop(TOKEN_VARIABLE, None) or told or _given
    return _given


def make_secret() -> bytes:
    """Return a new cluster secret."""
    return os.urandom(SECRET_SIZE)


def derive_key(secret: bytes, purpose: bytes) -> bytes:
    """Return the key for one purpose, 32 bytes.

    This is HKDF-SHA256 (RFC 5869) with an empty salt and one block of output.
    """
    extracted = hmac.digest(b"\0" * 32, secret, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


def parse_token(text: str) -> JoinToken:
    """Read a join token.

    Raises:
        TokenError: The text is no token of this version; it is not repeated in the message.
    """
    parts = text.strip().split(".")
    if parts == [""]:
        raise TokenError(f"The join token is empty. {_HOW}")
    if parts[0] != _PREFIX:
        raise TokenError(f"A join token begins with '{_PREFIX}.'; this text does not. {_HOW}")
    if len(parts) != 3:
        raise TokenError(
            f"A join token has 3 parts with dots between them; this one has {len(parts)}. {_HOW}"
        )
    _, fingerprint, secret = parts
    return JoinToken(
        fingerprint=_decode(fingerprint, "second", FINGERPRINT_SIZE),
        secret=_decode(secret, "third", SECRET_SIZE),
    )


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; a reader sees all of it or none.

    Raises:
        OSError: The folder does not exist or cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_token_file(path: Path, token: JoinToken) -> None:
    """Keep the token in a file that only its owner can read."""
    write_private(path, f"{token}\n".encode())


def read_token_file(path: Path) -> JoinToken:
    """Read a token kept in a file.

    Raises:
        TokenError: The file cannot be read or holds no token; the text names the file.
    """
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise TokenError(f"The token file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise TokenError(f"The file {path} holds no join token. {_HOW}") from None
    try:
        return parse_token(text)
    except TokenError as error:
        raise TokenError(f"The file {path}: {error}") from None


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(part: str, which: str, size: int) -> bytes:
    try:
        # `validate` refuses foreign characters, which the plain decoder would skip.
        data = base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise TokenError(
            f"The {which} part of the join token has characters that do not belong there, or "
            f"was cut. {_HOW}"
        ) from None
    if len(data) != size:
        raise TokenError(
            f"The {which} part of the join token is {'cut' if len(data) < size else 'too long'}. "
            f"{_HOW}"
        )
    return data
