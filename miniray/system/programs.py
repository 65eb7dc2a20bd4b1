"""Runs a program beside an event loop, for its output."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds in which a program that was killed is usually gone, and characters of its last words.
_LAST_SECONDS, _SHOWN = 1.0, 300
_PIPE = asyncio.subprocess.PIPE


class HelperFailedError(Exception):
    """A program has failed; the message ends with its last output."""


async def output_of(
    command: Sequence[str], seconds: float | None = None, given: bytes = b""
) -> bytes:
    """Return what a program prints.

    Args:
        command: The program and its arguments.
        seconds: After which it is killed; None: never.
        given: What it reads.

    Raises:
        TimeoutError: It was killed.
        HelperFailedError: It has failed.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(given), seconds)
    except asyncio.TimeoutError:
        raise TimeoutError(f"it takes more than {seconds:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, asyncio.TimeoutError):
                process.kill()
                # Else its pipes outlive the caller's event loop.
                await asyncio.wait_for(process.communicate(), _LAST_SECONDS)
    if process.returncode:
        raise HelperFailedError(" ".join(errors.decode(errors="replace").split())[-_SHOWN:])
    return output
