"""Where programs written for Ray look for names of its second train layer; there is one here."""

from __future__ import annotations

from miniray.core.absent import tell_imports

tell_imports(__name__, {"api": "import from miniray.train itself what is public"})
