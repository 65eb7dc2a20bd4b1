"""Reads what memray has recorded, in a process of its own: ``FILE LEAKS`` as arguments."""

from __future__ import annotations

import json
import sys

from miniray.profiling.inside import samples_of


def main() -> None:
    """Print the samples as JSON: of the peak, or with "leaks" of memory that was not freed."""
    from memray import FileReader

    path, what = sys.argv[1:]
    with FileReader(path) as reader:
        records = (
            reader.get_leaked_allocation_records(merge_threads=True)
            if what == "leaks"
            else reader.get_high_watermark_allocation_records(merge_threads=True)
        )
        found = samples_of((record.stack_trace()[::-1], float(record.size)) for record in records)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
