"""``multiprocessing.Pool`` on actors, so that a pool can span the cluster."""

from multiprocessing import TimeoutError  # noqa: A004 - named as in the standard library

from miniray.util.multiprocessing.pool import Pool
from miniray.util.multiprocessing.results import AsyncResult, IMapIterator

__all__ = ["AsyncResult", "IMapIterator", "Pool", "TimeoutError"]
