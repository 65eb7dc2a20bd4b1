"""Stacks, profiles and timelines of running processes.

Nothing of this is imported by a process before it is asked for such a thing.
"""
