"""From a trainer to a run and its result."""
