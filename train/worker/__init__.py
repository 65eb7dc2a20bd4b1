"""One rank: its session, its backend, its uploads."""
