"""``miniray start`` with accelerators: what variables, options and declarations give a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from command_helpers import CommandLine, command_line, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Variable by resource of the families that run on logical devices.
VARIABLES = {
    "GPU": "CUDA_VISIBLE_DEVICES",
    "neuron_cores": "NEURON_RT_VISIBLE_CORES",
    "TPU": "TPU_VISIBLE_CHIPS",
    "HPU": "HABANA_VISIBLE_MODULES",
    "NPU": "ASCEND_RT_VISIBLE_DEVICES",
    "FPGA": "FPGA_VISIBLE_DEVICES",
}

#: For each resource what an actor sees, and then a task: ids and the variable.
PROGRAM = """
import json, os, sys
import miniray as ray

VARIABLES = json.loads(sys.argv[1])

def sees(resource):
    ids = ray.get_runtime_context().get_accelerator_ids()[resource]
    return ids, os.environ.get(VARIABLES[resource])

@ray.remote(num_cpus=0)
class Actor:
    def ping(self, resource):
        return sees(resource)

ray.init(address="auto")
task = ray.remote(sees)
told = {}
for resource in VARIABLES:
    wanted = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}}
    actor = Actor.options(**wanted).remote()
    first = ray.get(actor.ping.remote(resource), timeout=60)
    told[resource] = [first, ray.get(task.options(**wanted).remote(resource), timeout=60)]
told["special"] = ray.cluster_resources()["special"]
print(json.dumps(told))
"""


@pytest.fixture
def command() -> Iterator[CommandLine]:
    for command in command_line():
        for variable in VARIABLES.values():
            command.environment.pop(variable, None)
        yield command


def test_a_head_sees_only_the_devices_that_its_variables_name(command: CommandLine) -> None:
    visible = dict.fromkeys(VARIABLES.values(), "1,3")
    others = {name: 2 for name in VARIABLES if name not in ("GPU", "FPGA")}
    command.start_head(
        *("--num-cpus", "2", "--num-gpus", "2"),
        *("--resources", json.dumps({**others, "special": 2})),
        *("--devices", json.dumps({"FPGA": {"count": 2, "env": "FPGA_VISIBLE_DEVICES"}})),
        **visible,
    )
    told = command.python(PROGRAM, json.dumps(VARIABLES))
    assert told.pop("special") == 2
    assert told == {resource: [[["1"], "1"], [["3"], "3"]] for resource in VARIABLES}


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        (["--num-gpus", "3"], "CUDA_VISIBLE_DEVICES", "3 GPU are asked for"),
        (["--resources", '{"HPU": 3}'], "HABANA_VISIBLE_MODULES", "3 HPU are asked for"),
        (
            ["--devices", '{"FPGA": {"count": 3, "env": "FPGA_VISIBLE_DEVICES"}}'],
            "FPGA_VISIBLE_DEVICES",
            "3 FPGA are asked for",
        ),
    ],
)
def test_more_devices_than_a_variable_names_are_refused_with_both_numbers(
    command: CommandLine, arguments: list[str], variable: str, said: str
) -> None:
    done = command.run("start", "--head", "--port", "0", *arguments, **{variable: "1,3"})
    line = one_line(done)
    assert said in line
    assert f"{variable}='1,3' names 2" in line
    command.leaves_nothing()
    assert command.sessions() == []
