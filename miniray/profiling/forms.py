"""Samples as a tree, and as files: a page that needs no network, collapsed stacks, speedscope."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.profiling.inside import Samples

#: Of the names of files that a profile is written to.
ENDINGS = (".html", ".collapsed", ".speedscope.json")
_STATIC = Path(__file__).parents[1] / "web" / "static"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{style}</style>
<main><h1>{title}</h1><p>{about}</p><div id="graph" class="flame"></div></main>
<script type="application/json" id="tree">{tree}</script>
<script type="module">
{script}
const tree = JSON.parse(document.getElementById("tree").textContent);
flameGraph(document.getElementById("graph"), tree, "{unit}");
</script></html>
"""
_STYLE = """
:root { color-scheme: light dark; } body { font: 15px system-ui, sans-serif; margin: 1.5rem; }
h1 { font-size: 1.2rem; }
"""


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


def page(tree: dict[str, Any], title: str, about: str, unit: str) -> str:
    """Return an HTML file with the flame graph of the page, for any browser and no network."""
    # Of "</script>" in a name the browser would make the end of the script.
    data = json.dumps(tree).replace("<", "\\u003c")
    return _PAGE.format(
        title=html.escape(title),
        about=html.escape(about),
        unit=unit,
        tree=data,
        style=_STYLE,
        script=(_STATIC / "flame.js").read_text(encoding="utf-8"),
    )


def as_file(found: dict[str, Any], title: str, path: Path) -> str:
    """Return a profile in the form that a file's name asks for.

    Args:
        found: What ``profile`` (looks.py) returns.
        title: Of the page.
        path: Ends in one of ``ENDINGS``.
    """
    if path.name.endswith(".speedscope.json"):
        return speedscope(found["samples"], title, found["unit"])
    if path.suffix == ".collapsed":
        return collapsed(found["samples"], found["unit"])
    about = " ".join([f"Recorded by {found['way']}.", *found["notes"]])
    return page(found["tree"], title, about, found["unit"])
