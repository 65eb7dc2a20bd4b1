"""The versions of the package and of Python; nodes of one cluster must agree on them."""

import sys

VERSION = "0.1.0"
#: As ``platform`` has it, which takes milliseconds to import.
PYTHON_VERSION = sys.version.split()[0]
