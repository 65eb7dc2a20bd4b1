from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests_cli_support import TOKEN, one_line

from miniray.exceptions import AuthenticationError, VersionMismatchError
from miniray.system.boot_options import BootError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result
    from tests_cli_support import Boot

    from miniray.system.session import ClusterRecord


def test_a_head_gets_what_the_options_say(miniray: Callable[..., Result], boot: Boot) -> None:
    result = miniray(
        "start", "--head", "--host", "0.0.0.0", "--port", "0", "--num-cpus", "4", "--num-gpus",
        "2", "--resources", '{"FPGA": 1.5}', "--labels", "zone=a,disk=ssd", "--memory", "2GiB",
        "--object-store-memory", "512MiB", "--temp-dir", "/scratch", "--gpu-family", "amd",
        "--node-ip-address", "10.0.0.9",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (options,) = boot.asked
    assert options.head
    assert (options.host, options.port, options.node_ip_address) == ("0.0.0.0", 0, "10.0.0.9")
    assert (options.num_cpus, options.num_gpus, options.gpu_family) == (4, 2, "amd")
    assert options.resources == {"FPGA": 1.5}
    assert options.labels == {"zone": "a", "disk": "ssd"}
    assert (options.memory, options.object_store_memory) == (2 * 2**30, 512 * 2**20)
    assert options.temp_dir == "/scratch"


def test_the_port_is_rays_with_head_and_any_free_one_without(
    miniray: Callable[..., Result], boot: Boot
) -> None:
    miniray("start", "--head")
    miniray("start", "--address", "127.0.0.1:6379", "--token", TOKEN)
    assert [options.port for options in boot.asked] == [6379, 0]


def test_what_is_wrong_with_a_node_that_runs_is_told(
    miniray: Callable[..., Result], boot: Boot
) -> None:
    assert miniray("start", "--head").stderr == ""
    boot.warning = "No file can be made in /spilled."
    told = miniray("start", "--head")
    assert told.exit_code == 0
    assert told.stderr == "Warning: No file can be made in /spilled.\n"


def test_a_head_on_loopback_says_that_others_cannot_join(miniray: Callable[..., Result]) -> None:
    assert "listens on this machine only" in miniray("start", "--head").stdout


def test_a_joining_node_does_not_print_the_token(miniray: Callable[..., Result]) -> None:
    result = miniray("start", "--address", "127.0.0.1:6379", "--token", TOKEN)
    assert "joined the cluster at 127.0.0.1:6379" in result.stdout
    assert TOKEN not in result.stdout


@pytest.mark.parametrize("source", ["variable", "file", "stdin"])
def test_the_token_need_not_be_on_the_command_line(
    miniray: Callable[..., Result],
    boot: Boot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    arguments = {
        "variable": [],
        "file": ["--token-file", str(tmp_path / "token")],
        "stdin": ["--token-file", "-"],
    }[source]
    if source == "variable":
        monkeypatch.setenv("MINIRAY_TOKEN", TOKEN)
    result = miniray("start", "--address", "h:1", *arguments, input=f"{TOKEN}\n")
    assert result.exit_code == 0, result.output
    assert boot.asked[0].token == TOKEN


def test_a_head_ignores_the_token_of_the_environment(
    miniray: Callable[..., Result], boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_TOKEN", TOKEN)
    assert miniray("start", "--head").exit_code == 0
    assert boot.asked[0].token is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "either --head"),
        (["--head", "--address", "h:1"], "either --head"),
        (["--head", "--token", TOKEN], "a token of its own"),
        (["--head", "--num-cpus", "-1"], "num_cpus must be a finite number of at least 0, not -1"),
        (["--head", "--num-gpus", "-1"], "num_gpus must be a finite number of at least 0, not -1"),
        (["--head", "--num-cpus", "many"], "'many' is not a valid float"),
        (["--head", "--resources", "{FPGA: 1}"], "is not JSON"),
        (["--head", "--devices", "[1]"], """Write it as '{"FPGA": {"count": 4, "env": """),
        (["--head", "--devices", '{"FPGA": 4}'], """write {"FPGA": {"count": 4, "env": """),
        (["--head", "--devices", '{"FPGA": {"env": "X"}}'], "with the keys count, env, fractional"),
        (["--head", "--devices", '{"GPU": {"count": 1}}'], "use num_gpus for it"),
        (
            ["--head", "--resources", '{"F": 1}', "--devices", '{"F": {"count": 1}}'],
            "'F' is given in --resources and in --devices",
        ),
        (["--head", "--resources", "[1]"], "is not a JSON object"),
        (["--head", "--resources", '{"FPGA": "x"}'], "must be a number, not 'x'"),
        (["--head", "--resources", '{"GPU": 1}'], "use num_gpus"),
        (["--head", "--labels", "zone"], "'zone' is no label"),
        (["--head", "--labels", "a=1,a=2"], "'a' is given twice"),
        (["--head", "--labels", "a=b c"], "'b c'"),
        (["--head", "--object-store-memory", "lots"], "'lots' is no size"),
        (["--head", "--object-store-memory", "-5"], "'-5' is no size"),
        (["--head", "--port", "70000"], "not 70000"),
        (["--head", "--wrong"], "No such option"),
        (["--address", "h:1"], "give its token"),
        (["--address", "h:", "--token", TOKEN], "HOST:PORT"),
        (["--address", "h:1", "--token", TOKEN[:-9]], "third part of the join token is cut"),
        (["--address", "h:1", "--token", TOKEN, "--token-file", "f"], "not both"),
        (["--address", "h:1", "--token-file", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_bad_options_are_one_line_and_start_nothing(
    miniray: Callable[..., Result], boot: Boot, arguments: list[str], complaint: str
) -> None:
    result = miniray("start", *arguments)
    line = one_line(result)
    assert complaint in line
    assert "miniray" in line or "main" in line
    assert "--help" in line
    assert result.exit_code == 2
    assert boot.asked == []


def test_the_help_shows_both_ways_to_start_on_lines_of_their_own(
    miniray: Callable[..., Result],
) -> None:
    lines = [line.strip() for line in miniray("start", "--help").stdout.splitlines()]
    assert {"miniray start --head", "MINIRAY_TOKEN=TOKEN miniray start --address HOST:PORT"} <= {
        *lines
    }


def test_a_wrong_token_is_never_echoed(miniray: Callable[..., Result]) -> None:
    secret = TOKEN.rpartition(".")[2][:-5]
    line = one_line(miniray("start", "--address", "h:1", "--token", f"mr1.{secret}"))
    assert secret not in line


@pytest.mark.parametrize(
    "error",
    [
        BootError("The head did not start."),
        AuthenticationError("The token is for another cluster."),
        VersionMismatchError("miniray", "0.1", "0.2"),
        ConnectionRefusedError("Nothing listens at h:1."),
        TimeoutError("No answer from h:1 within 5 s."),
        PermissionError(13, "Permission denied", "/tmp/x"),
        ValueError("2 GPU are asked for, but CUDA_VISIBLE_DEVICES names 1."),
    ],
)
def test_a_failed_start_is_one_line(
    miniray: Callable[..., Result], boot: Boot, error: Exception
) -> None:
    boot.error = error
    line = one_line(miniray("start", "--head"))
    assert line.startswith("Error: ")
    assert "Errno" not in line
    assert (str(error) if not isinstance(error, PermissionError) else "/tmp/x") in line


def test_an_error_of_ours_keeps_its_traceback(miniray: Callable[..., Result], boot: Boot) -> None:
    boot.error = KeyError("bug")
    assert isinstance(miniray("start", "--head").exception, KeyError)


def test_a_program_with_a_cluster_of_its_own_does_not_hinder_a_head(
    miniray: Callable[..., Result], boot: Boot, record: Callable[..., ClusterRecord]
) -> None:
    record(address="unix:/tmp/mr-0-12345678/head.sock", embedded=True)
    result = miniray("start", "--head")
    assert result.exit_code == 0, result.output
    assert len(boot.asked) == 1
