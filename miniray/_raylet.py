"""Names that programs import from Ray's ``_raylet``: refs, and the generators of them."""

from __future__ import annotations

from miniray.common.object_ref import ObjectRef
from miniray.objects.object_ref_generator import DynamicObjectRefGenerator, ObjectRefGenerator

__all__ = ["DynamicObjectRefGenerator", "ObjectRef", "ObjectRefGenerator"]
