"""Names that programs import from Ray's ``_raylet``: the generators of refs."""

from __future__ import annotations

from miniray.objects.object_ref_generator import DynamicObjectRefGenerator, ObjectRefGenerator

__all__ = ["DynamicObjectRefGenerator", "ObjectRefGenerator"]
