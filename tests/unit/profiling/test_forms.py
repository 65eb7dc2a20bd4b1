"""A profile as a tree and as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miniray.profiling import forms

SAMPLES: list[tuple[list[str], float]] = [
    (["main (a.py:1)", "work (a.py:2)"], 1.5),
    (["main (a.py:1)", "</script><b>"], 0.5),
    (["main (a.py:1)"], 0.25),
]


def found() -> dict[str, Any]:
    tree = forms.tree_of(SAMPLES, "all")
    return {"samples": SAMPLES, "tree": tree, "unit": "seconds", "way": "py-spy", "notes": []}


def test_equal_frames_are_one_node_whose_value_is_that_of_all_below() -> None:
    tree = forms.tree_of(SAMPLES, "all")
    assert (tree["name"], tree["value"]) == ("all", 2.25)
    [main] = tree["children"]
    assert main["value"] == 2.25
    assert [(each["name"], each["value"]) for each in main["children"]] == [
        ("work (a.py:2)", 1.5),
        ("</script><b>", 0.5),
    ]


def test_a_stack_deeper_than_pythons_recursion_has_a_tree() -> None:
    tree = forms.tree_of([([str(depth) for depth in range(5000)], 1.0)], "all")
    assert tree["children"][0]["name"] == "0"


def test_collapsed_stacks_have_whole_numbers() -> None:
    lines = forms.as_file(found(), "cpu", Path("x.collapsed")).splitlines()
    assert lines[0] == "main (a.py:1);work (a.py:2) 1500"
    assert lines[2] == "main (a.py:1) 250"


def test_speedscope_gets_frames_by_number_and_weights() -> None:
    data = json.loads(forms.as_file(found(), "cpu", Path("x.speedscope.json")))
    [profile] = data["profiles"]
    assert profile["unit"] == "seconds"
    assert profile["weights"] == [1.5, 0.5, 0.25]
    names = [data["shared"]["frames"][index]["name"] for index in profile["samples"][0]]
    assert names == ["main (a.py:1)", "work (a.py:2)"]


def test_the_html_file_has_all_it_needs_in_it_and_no_name_becomes_code() -> None:
    page = forms.as_file(found(), "cpu of <A>", Path("x.html"))
    assert "src=" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "export function flameGraph" in page
    assert "cpu of &lt;A&gt;" in page
    assert "</script><b>" not in page
