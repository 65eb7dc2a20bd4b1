"""Asks Ascend's device library (ACL) what the NPUs of this machine are, and prints it.

Run as a program by detection, so that a library that hangs, crashes or starts threads does so in a
process of its own; it imports only the standard library. Both questions are answered by the
driver alone, without ``aclInit`` and without a device being set
(https://github.com/hicann/runtime, src/acl/aclrt_impl: device.cpp, acl_rt_impl_base.cpp).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_LIBRARY = "libascendcl.so"
#: Where the toolkit is, if its set_env.sh was not sourced.
_DEFAULT_HOME = "/usr/local/Ascend/ascend-toolkit/latest"


def main() -> None:
    """Print the name of the chip, such as ``Ascend910B3``; no lines where there is no library."""
    # The daemon applies visibility, not the library, which need not have the daemon's ids.
    os.environ.pop("ASCEND_RT_VISIBLE_DEVICES", None)
    library = _library()
    if library is None:
        return
    count = ctypes.c_uint32()
    error = library.aclrtGetDeviceCount(ctypes.byref(count))
    if error:
        sys.exit(f"aclrtGetDeviceCount failed with error {error}")
    name = library.aclrtGetSocName
    name.restype = ctypes.c_char_p
    sys.stdout.write((name() or b"").decode())


def _library() -> ctypes.CDLL | None:
    home = os.environ.get("ASCEND_HOME_PATH", _DEFAULT_HOME)
    for path in (_LIBRARY, f"{home}/lib64/{_LIBRARY}"):
        with contextlib.suppress(OSError):  # it is not there, or what it needs is not
            return ctypes.CDLL(path)
    return None


if __name__ == "__main__":
    main()
