"""What every process uses: errors, ids, names, settings, the runtime's interface."""
