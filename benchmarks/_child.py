"""Runs one row on one engine in this process and writes the figures to a file.

    python _child.py ENGINE MODULE ROW FILE

The parent gives the time limit and ends whatever this leaves behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from _common import Engine, load_rows
from _processes import end_with_starter


def main() -> None:
    end_with_starter()
    name, module, key, file = sys.argv[1:]
    engine = Engine(name)
    try:
        outcome = {"figures": load_rows([module])[key].measure(engine)}
    except Exception as error:  # noqa: BLE001 - any failure is a result of the row
        outcome = {"error": f"{type(error).__name__}: {error}"}
    Path(file).write_text(json.dumps(outcome))
    engine.stop()


if __name__ == "__main__":
    main()
