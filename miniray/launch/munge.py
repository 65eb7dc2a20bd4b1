"""A line that only this user can read, on hosts that share a key of munge, as those of Slurm do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

#: Seconds for which a line can be read; more than an hour is more than munge allows.
_TTL = 3600


class MungeError(OSError):
    """munge is missing, refuses a line, or the line is another user's."""


def seal(text: str) -> str:
    """Encrypt a line for this user's processes, on any host with the same key."""
    return _run(("munge", f"--restrict-uid={os.geteuid()}", f"--ttl={_TTL}"), text).strip()


def unseal(credential: str) -> str:
    """Return a line that this user has sealed. A host can do that once for each line.

    Raises:
        MungeError: The text is not from this user, or not for this one, or was read on this host
            before.
    """
    told, _, text = _run(("unmunge",), credential).partition("\n\n")
    encoder = re.search(r"^UID:.*\((?P<uid>\d+)\)$", told, re.MULTILINE)
    if encoder is None or int(encoder["uid"]) != os.geteuid():
        raise MungeError("The line with the cluster's token was written by another user.")
    return text


def _run(command: tuple[str, ...], given: str) -> str:
    if shutil.which(command[0]) is None:
        raise MungeError(f"There is no program {command[0]!r} here: give --rendezvous a folder.")
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MungeError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout
