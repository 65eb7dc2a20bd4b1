"""Values in one process: references, shared memory, waiting."""
