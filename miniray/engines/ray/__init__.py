"""Ray as the engine: the interface ``Runtime`` on an existing Ray cluster.

Only this package imports ``ray``. What it does not offer is in ``capabilities.py``.
"""
