"""Two hosts with an OpenSSH server each, and a laptop, as namespaces of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from needed_tools import find_tool, missing

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = {"hosta": "10.79.1.2", "hostb": "10.79.1.3"}
LAPTOP = "10.79.1.1"
#: The laptop has the switch; each host has one cable, whose name there is ``cable``.
SWITCH = """
ip netns add {laptop}
ip -n {laptop} link set lo up
ip -n {laptop} link add switch type bridge
ip -n {laptop} addr add {address}/24 dev switch
ip -n {laptop} link set switch up
"""
HOST = """
ip netns add {space}
ip -n {space} link set lo up
ip link add cable netns {space} type veth peer name {name} netns {laptop}
ip -n {laptop} link set {name} master switch up
ip -n {space} addr add {address}/24 dev cable
ip -n {space} link set cable up
until ip -n {space} link show cable | grep -q 'state UP'; do sleep 0.05; done
"""
#: Programs of a host see its name; its server has a folder for itself alone.
SERVER = 'hostname "$1" && mount -t tmpfs none /run && mkdir /run/sshd && exec "$2" -D -e -f "$3"'
CONFIGURATION = """
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PidFile none
SetEnv MINIRAY_MACHINE_ID={name} {variables}
"""
CLIENT = """
User {user}
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking yes
"""
#: Seconds that a server may take on a busy machine.
PATIENCE = 60.0


@dataclasses.dataclass
class Network:
    """The namespaces, and a laptop whose ssh knows the hosts.

    Args:
        folder: Of keys and settings.
        environment: Of programs on the laptop.
        variables: Of programs on the hosts.
    """

    folder: Path
    environment: dict[str, str]
    variables: dict[str, str]
    servers: list[subprocess.Popen[str]] = dataclasses.field(default_factory=list)

    @property
    def laptop(self) -> str:
        """The name of a namespace."""
        return f"mr{os.getpid()}laptop"

    def space(self, name: str) -> str:
        """The name of a host's namespace."""
        return f"mr{os.getpid()}{name}"

    def popen(self, *words: str) -> subprocess.Popen[str]:
        """Start a program on the laptop."""
        return self._popen("ip", "netns", "exec", self.laptop, *words)

    def _popen(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def of_servers(self) -> set[int]:
        """Ids of the servers, and of their halves of connections."""
        names = Path("/proc").glob("[0-9]*/comm")
        return {int(path.parent.name) for path in names if _text(path) == "sshd\n"}

    @contextlib.contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Pull the cable of a host for the time of the block."""
        cable = ["ip", "-n", self.space(name), "link", "set", "cable"]
        subprocess.run([*cable, "down"], check=True)
        try:
            yield
        finally:
            subprocess.run([*cable, "up"], check=True)
            self._greet(name)

    def connect(self) -> None:
        """Make the namespaces."""
        lines = SWITCH.format(laptop=self.laptop, address=LAPTOP)
        for name, address in HOSTS.items():
            lines += HOST.format(
                space=self.space(name), laptop=self.laptop, name=name, address=address
            )
        done = subprocess.run(["sh", "-ec", lines], capture_output=True, check=False, text=True)
        if done.returncode != 0:
            missing(f"network namespaces cannot be connected here: {done.stderr.strip()}")

    def serve(self) -> None:
        """Make keys, and start the servers."""
        sshd, ssh = find_tool("sshd"), find_tool("ssh")
        for key in ("host", "user"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)]
            subprocess.run(keygen, check=True)
        public = (self.folder / "host.pub").read_text()
        client = CLIENT.format(user=pwd.getpwuid(os.geteuid()).pw_name, folder=self.folder)
        variables = " ".join(f"{name}={value}" for name, value in self.variables.items())
        for name, address in HOSTS.items():
            settings = self.folder / f"{name}.conf"
            settings.write_text(
                CONFIGURATION.format(
                    address=address, folder=self.folder, name=name, variables=variables
                )
            )
            inside = ("ip", "netns", "exec", self.space(name), "unshare", "--uts", "--mount")
            self.servers.append(
                self._popen(*inside, "sh", "-ec", SERVER, "sh", name, sshd, str(settings))
            )
            with (self.folder / "known").open("a") as known:
                known.write(f"{address} {public}")
            client += f"Host {name}\n  HostName {address}\n"
        (self.folder / "config").write_text(client)
        (self.folder / "bin").mkdir()
        program = self.folder / "bin/ssh"
        program.write_text(f'#!/bin/sh\nexec {ssh} -F {self.folder}/config "$@"\n')
        program.chmod(0o755)
        path = self.environment["PATH"]
        self.environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{path}"
        for name in HOSTS:  # until the servers listen
            self._greet(name)

    def _greet(self, name: str) -> None:
        greeting = f"until ssh -o ConnectTimeout=1 {name} true; do sleep 0.05; done"
        assert self.popen("timeout", str(PATIENCE), "sh", "-c", greeting).wait() == 0

    def take_down(self) -> None:
        """End all that runs in the namespaces, and remove them.

        A server's half of a connection that was cut would wait for the other one for long.
        """
        for space in (*map(self.space, HOSTS), self.laptop):
            listing = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, check=False, text=True
            )
            for pid in map(int, listing.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        for server in self.servers:
            server.communicate(timeout=PATIENCE)


@contextlib.contextmanager
def network(
    folder: Path, environment: dict[str, str], variables: dict[str, str], *, servers: bool = True
) -> Iterator[Network]:
    """Hosts that end with the block, with servers or without."""
    found = Network(folder, dict(environment), variables)
    try:
        found.connect()
        if servers:
            found.serve()
        yield found
    finally:
        found.take_down()


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return path.read_text()
    return ""
