"""Samples as a tree, and as files: a page that needs no network, collapsed stacks, speedscope."""

from __future__ import annotations

import html
import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.profiling.inside import Samples

#: Of the names of files that a profile is written to.
ENDINGS = (".html", ".collapsed", ".speedscope.json")
#: The page of a saved profile, and the script that draws it, as on the cluster's page.
_PAGE = Path(__file__).with_name("profile.html")
_SCRIPT = Path(__file__).parents[1] / "web" / "static" / "flame.js"


def tree_of(samples: Samples, name: str) -> dict[str, Any]:
    """Return samples as one tree of ``{"name", "value", "children"}``."""
    root: dict[str, Any] = {"name": name, "value": 0.0, "children": {}}
    for frames, value in samples:
        node = root
        node["value"] += value
        for frame in frames:
            node = node["children"].setdefault(frame, {"name": frame, "value": 0.0, "children": {}})
            node["value"] += value
    waiting = [root]
    while waiting:  # no recursion: stacks may be deep
        node = waiting.pop()
        node["children"] = list(node["children"].values())
        waiting += node["children"]
    return root


def collapsed(samples: Samples, unit: str) -> str:
    """Return one line a stack, as flamegraph.pl takes it: milliseconds or bytes."""
    factor = 1000 if unit == "seconds" else 1
    rows = ((";".join(frames), round(value * factor)) for frames, value in samples)
    return "".join(f"{stack} {value}\n" for stack, value in rows if value)


def speedscope(samples: Samples, name: str, unit: str) -> str:
    """Return a file for https://www.speedscope.app."""
    places: dict[str, int] = {}
    rows = [[places.setdefault(frame, len(places)) for frame in frames] for frames, _ in samples]
    weights = [value for _, value in samples]
    profile = {
        "type": "sampled",
        "name": name,
        "unit": unit,
        "startValue": 0,
        "endValue": sum(weights),
        "samples": rows,
        "weights": weights,
    }
    return json.dumps(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "shared": {"frames": [{"name": frame} for frame in places]},
            "profiles": [profile],
            "name": name,
            "exporter": "miniray",
        }
    )


def as_file(found: dict[str, Any], title: str, path: Path) -> str:
    """Return a profile in the form that a file's name selects.

    Args:
        found: What ``profile`` (looks.py) returns.
        title: Of the page.
        path: Ends in one of ``ENDINGS``.
    """
    if path.name.endswith(".speedscope.json"):
        return speedscope(found["samples"], title, found["unit"])
    if path.suffix == ".collapsed":
        return collapsed(found["samples"], found["unit"])
    return string.Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        about=html.escape(" ".join([f"Recorded by {found['way']}.", *found["notes"]])),
        unit=found["unit"],
        # Of "</script>" in a name the browser would make the end of the script.
        tree=json.dumps(found["tree"]).replace("<", "\\u003c"),
        script=_SCRIPT.read_text(encoding="utf-8"),
    )
