"""Ray as the engine. Only this package imports ``ray``; ``capabilities.py`` has what it lacks."""
