"""Names of accelerator models for ``accelerator_type=``, and the module for TPU slices.

The names are defined with the families that detect them; this is where programs
written for Ray look for them.
"""

import miniray.util.tpu as tpu  # noqa: F401 - Ray has it here too
from miniray.accelerators.models import *  # noqa: F403 - they are all for users
