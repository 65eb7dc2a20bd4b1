"""Writes to the user's standard output and error, which may be anything.

A stream may be closed, a broken pipe, a full disk, or unable to say what is written. What is
written here only informs, so nothing of that is raised.
"""

from __future__ import annotations

import logging
from typing import TextIO

logger = logging.getLogger(__name__)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream says that it is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except Exception:  # closed, or a stand-in that may raise anything
        logger.debug("A stream can't tell whether it is a terminal.", exc_info=True)
        return False


def write(stream: TextIO | None, text: str) -> None:
    """Write and flush; what the stream raises goes to the log.

    Characters that its encoding does not have are written as escapes.
    """
    if stream is None or not text:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except Exception:
        # The stream is the user's and may raise anything; the caller has other things to do.
        logger.debug("A text for the user could not be written.", exc_info=True)
