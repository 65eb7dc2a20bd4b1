"""Finding the head of a run: every address that it may have, until one answers or time is up."""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

from miniray.common.host_port import full_address, parse_address
from miniray.security.token import parse_token
from miniray.system.machine import address_towards

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from miniray.security.token import JoinToken

#: Seconds that a head may take to answer; an address that leads nowhere takes all of it.
_PATIENCE = 5.0
#: Seconds between two rounds: a head on another machine sends no sign that it listens.
_PAUSE = 0.2


class NotReachedError(ConnectionError):
    """No head of the run answered in time; the text says what each address did."""


class UnreachableError(NotReachedError):
    """A head that listens cannot be reached from here: each address refuses, or has no route."""


@dataclasses.dataclass(frozen=True)
class HeadOffer:
    """Where the head of a run may be, and what is needed to join it."""

    #: ``HOST:PORT`` or ``HOST``.
    addresses: tuple[str, ...]
    token: JoinToken
    #: Whether the head is announced to listen; else an address that refuses may be tried too early.
    listens: bool = True

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> HeadOffer:
        """Read what travelled as JSON."""
        return cls(tuple(data["addresses"]), parse_token(data["token"]))

    def as_json(self) -> str:
        """Return one line, which has the secret."""
        return json.dumps({"addresses": self.addresses, "token": str(self.token)})


def reach_head(
    find: Callable[[], HeadOffer | None],
    seconds: float,
    sleep: Callable[[float], object] = time.sleep,
    note: Callable[[str], object] = lambda _: None,
) -> tuple[str, JoinToken]:
    """Return the address at which the head answers, and the token to join with.

    Args:
        find: Says where it may be, before each round; None: that is not known yet.
        seconds: For which this goes on.
        sleep: Waits between two rounds.
        note: Takes what a round has failed at, where that is something new.

    Raises:
        NotReachedError: It did not answer.
    """
    deadline = time.monotonic() + seconds
    reason = "the first host has not published its address."
    while True:
        door = find()
        try:
            if door is not None:
                return first_to_answer(door), door.token
        except UnreachableError:
            raise
        except NotReachedError as error:
            if str(error) != reason:
                reason = str(error)
                note(reason)
        if time.monotonic() > deadline:
            raise NotReachedError(f"The head was not found within {seconds:g} s: {reason}")
        sleep(_PAUSE)


def first_to_answer(door: HeadOffer) -> str:
    """Return the first address at which the head with the token's certificate answers.

    All are tried side by side, and names looked up again: those of pods come late. Any other server
    at one of them has another certificate, and is not sent the secret.

    Raises:
        UnreachableError: None can, if the head listens.
        NotReachedError: None did.
    """
    from miniray.security.certificates import make_credentials, meet_head

    places = list(dict.fromkeys(full_address(address) for address in door.addresses))
    credentials = make_credentials(door.token.members_key)

    def answers(address: str) -> str:
        host, port = parse_address(address)
        meet_head(host, port, door.token.fingerprint, credentials, _PATIENCE)
        return address

    pool = futures.ThreadPoolExecutor(max_workers=len(places))
    try:
        attempts = [pool.submit(answers, place) for place in places]
        for attempt in futures.as_completed(attempts):
            if attempt.exception() is None:
                return attempt.result()
        errors = [attempt.exception() for attempt in attempts]
        undecided = any(isinstance(error, TimeoutError) for error in errors)
        kind = UnreachableError if door.listens and not undecided else NotReachedError
        raise kind(" ".join(map(str, errors)))
    finally:
        pool.shutdown(wait=False)


def leading_to(other: str, own: Collection[str]) -> str | None:
    """Return which of our addresses leads to one of another host; None if none does.

    An address that this host has too, as that of a bridge of containers, is not the other host's.
    """
    try:
        return None if other in own else address_towards(other)
    except OSError:
        return None
