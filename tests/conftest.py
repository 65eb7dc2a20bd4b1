"""What holds for all tests."""

from __future__ import annotations

import os

# Some tests fork while gRPC, which others of the same process use, has threads. No process that
# runs user code imports gRPC, so its fork handlers, which end such a child, are out of place.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
