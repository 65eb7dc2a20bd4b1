"""The paths at which programs written for Ray look for names of its second train layer.

There is one train layer here: the modules below have names of ``miniray.train``,
``miniray.train.torch`` and ``miniray.train.jax``.
"""
