"""What a process knows of values: references, shared memory, waiting."""
