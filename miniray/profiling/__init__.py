"""Stacks, profiles and timelines of running processes.

A process imports this only at the first such request.
"""
