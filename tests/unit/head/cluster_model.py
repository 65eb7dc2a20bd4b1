"""A head with daemons and clients that only exist as messages, and anything may get lost or die.

Each daemon knows what runs on it: that is the truth with which the head's table is compared.
Messages wait on their way until the test delivers them; what is on its way when a session breaks
is lost, and what the storage had not written when the head is killed too.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import Any

from head_harness import actor_spec, task_spec
from model_parts import Clock, Daemon, Disk, Process, Running

from miniray.common.specs import BundleAffinity
from miniray.head.cluster import HeadIdentity
from miniray.head.head import Head

AMOUNTS = [0.25, 0.4, 0.5, 0.6, 1, 2]


class World:
    """A cluster to which things happen at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = itertools.count(1)
        self._requests = itertools.count(1)
        self.disk = Disk(self)
        self.timers = Clock()
        self.head: Head
        self.daemons: list[Daemon] = []
        self._joined: set[bytes] = set()
        #: Requests to end actors and groups that were not answered, and what was ended, with
        #: the daemon that asked for it.
        self._ending: dict[int, tuple[bytes, Daemon]] = {}
        self.over: dict[bytes, Daemon] = {}
        #: Actors that ended themselves.
        self.exited: set[bytes] = set()
        #: What must not happen, and has.
        self.wrong: list[str] = []
        #: What does not end with its creator.
        self.detached: list[tuple[str, bytes]] = []
        self.log: list[str] = []
        #: All that heads said and kept.
        self.told = hashlib.sha256()
        self.restart_head()
        for _ in range(3):
            self.add_node()

    def new_id(self) -> bytes:
        return next(self._ids).to_bytes(8, "big")

    def was_here(self, daemon: Daemon) -> bool:
        known = daemon.id in self._joined
        self._joined.add(daemon.id)
        return known

    # --- asking ------------------------------------------------------------------
    def processes(self) -> list[Process]:
        return [p for d in self.daemons for p in d.processes.values()]

    def drivers(self) -> list[Process]:
        return [process for process in self.processes() if process.is_driver]

    def running(self) -> list[tuple[Daemon, Running]]:
        return [(d, lease) for d in self.daemons for lease in d.leases.values()]

    def runs(self, process_id: bytes) -> bool:
        return any(process_id in daemon.processes for daemon in self.daemons)

    def process_gone(self, process_id: bytes) -> None:
        """Whoever used a process hears that it is gone."""
        for client in self.processes():
            for number, (_, its) in list(client.held.items()):
                if its == process_id:
                    client.give_back(number, broken=True)

    def ask_to_end(self, client: Process, method: str, id: bytes, *args: Any) -> None:
        """What was answered has ended for good. Others than its creator know of it later."""
        there = (*self.head.cluster.placement_groups.all(), *self.head.cluster.actors.all())
        if any(each.id == id for each in there):
            client = self._client() or client
        number = next(self._requests)
        self._ending[number] = id, client.daemon
        client.ask(method, id, *args, number=number)

    def answered(self, number: int) -> None:
        if number in self._ending:
            id, daemon = self._ending.pop(number)
            self.over[id] = daemon

    # --- what happens ------------------------------------------------------------
    def step(self) -> None:
        actions = {
            self.deliver: 40,
            self.start_worker: 14,
            self.end_worker: 10,
            self.crash_worker: 3,
            self.fail_start: 2,
            self.actor_ends_itself: 1,
            self.write: 8,
            self.pass_time: 6,
            self.make_actor: 8,
            self.end_actor: 6,
            self.make_group: 3,
            self.remove_group: 3,
            self.want: 6,
            self.give_back: 6,
            self.add_driver: 1,
            self.end_driver: 1,
            self.kill_head: 1.5,
            self.kill_node: 0.7,
            self.break_session: 0.7,
            self.rejoin: 8,
        }
        action = self.random.choices(list(actions), list(actions.values()))[0]
        self.log.append(action.__name__)
        action()

    def deliver(self) -> None:
        daemon = self.random.choice(self.daemons)
        count = self.random.choice([1, 1, 3, 100])
        if self.random.random() < 0.5:
            daemon.deliver_up(count)
        else:
            daemon.deliver_down(count)

    def write(self) -> None:
        self.disk.write(self.random.randint(0, self.disk.unwritten))

    def pass_time(self) -> None:
        seconds = self.random.choice([0.02, 0.1, 0.5, 1, 3, 16])
        if seconds >= 1:  # so long nothing is on its way to a head that lives, or to its disk
            for daemon in self.daemons:
                daemon.deliver_up(10_000)
            self.disk.write()
        self.timers.pass_time(seconds)

    def start_worker(self) -> None:
        starting = [(d, lease) for d, lease in self.running() if lease.process is None]
        if starting:
            daemon, lease = self.random.choice(starting)
            if lease.ending:
                daemon.end(lease, None)
            else:
                daemon.ready(lease)

    def fail_start(self) -> None:
        starting = [(d, lease) for d, lease in self.running() if lease.process is None]
        if starting:
            daemon, lease = self.random.choice(starting)
            daemon.fail_to_start(lease)

    def end_worker(self) -> None:
        ending = [(d, lease) for d, lease in self.running() if lease.ending]
        if ending:
            daemon, lease = self.random.choice(ending)
            daemon.end(lease, -9)

    def crash_worker(self) -> None:
        running = [(d, lease) for d, lease in self.running() if lease.process is not None]
        if running:
            daemon, lease = self.random.choice(running)
            daemon.end(lease, -9)

    def actor_ends_itself(self) -> None:
        running = [(d, lease) for d, lease in self.running() if lease.alive]
        if running:
            daemon, lease = self.random.choice(running)
            daemon.report(daemon._report(lease, exiting=True))
            daemon.end(lease, 0)
            if not lease.ending and self.disk.knows(lease.actor_id, lease.number):
                daemon.exited.add(lease.actor_id)
                self.exited.add(lease.actor_id)

    def _client(self) -> Process | None:
        processes = self.processes()
        drivers = self.drivers()
        if not processes:
            return None
        return self.random.choice(drivers if drivers and self.random.random() < 0.8 else processes)

    def _placement(self, client: Process, amount: float) -> Any:
        groups = [group for group in client.groups if group[1] >= amount]
        if groups and self.random.random() < 0.5:
            return BundleAffinity(self.random.choice(groups)[0], 0)
        return None

    def make_actor(self) -> None:
        client = self._client()
        if client is None or len(client.actors) > 6:
            return
        id = client.id + self.new_id()
        amount = self.random.choice(AMOUNTS)
        detached = self.random.random() < 0.2
        if detached:
            self.detached.append(("kill_actor", id))
        spec = actor_spec(
            resources={"GPU": amount},
            placement_resources={"GPU": amount},
            max_restarts=self.random.choice([0, 0, 1, -1]),
            detached=detached,
            placement=self._placement(client, amount),
            owner_node=client.daemon.id,
        )
        client.ask("create_actor", id, spec, False)
        client.ask("start_actor", id, (0, b"", ()), [], None)
        client.actors.append(id)

    def end_actor(self) -> None:
        clients = [client for client in self.processes() if client.actors]
        if clients:
            client = self.random.choice(clients)
            id = client.actors.pop(self.random.randrange(len(client.actors)))
            if self.random.random() < 0.5:
                self.ask_to_end(client, "kill_actor", id, True)
            else:
                client.ask("actor_out_of_scope", id)

    def make_group(self) -> None:
        client = self._client()
        if client is None or len(client.groups) > 2:
            return
        id = client.id + self.new_id()
        bundles = [
            {"GPU": self.random.choice([0.5, 1, 2])} for _ in range(self.random.randint(1, 3))
        ]
        strategy = self.random.choice(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
        detached = self.random.random() < 0.2
        if detached:
            self.detached.append(("remove_placement_group", id))
        client.ask("create_placement_group", id, bundles, strategy, "", "", detached, None)
        client.groups.append((id, int(bundles[0]["GPU"]) or 0.5))  # type: ignore[arg-type]

    def remove_group(self) -> None:
        clients = [client for client in self.processes() if client.groups]
        if clients:
            client = self.random.choice(clients)
            id, _ = client.groups.pop(self.random.randrange(len(client.groups)))
            self.ask_to_end(client, "remove_placement_group", id)

    def want(self) -> None:
        client = self._client()
        if client is None:
            return
        group = self.random.randint(1, 3)
        spec = client.specs.get(group)
        if spec is None:
            amount = self.random.choice(AMOUNTS)
            placement = self._placement(client, amount)
            spec = task_spec(resources={"GPU": amount}, max_calls=1, placement=placement)
        client.want(group, spec, self.random.randint(0, 3))

    def give_back(self) -> None:
        clients = [client for client in self.processes() if client.held]
        if clients:
            client = self.random.choice(clients)
            client.give_back(self.random.choice(list(client.held)))

    def add_driver(self) -> None:
        if len(self.drivers()) < 3:
            self.random.choice(self.daemons).attach()

    def end_driver(self) -> None:
        if self.drivers():
            self._end_driver(self.random.choice(self.drivers()))

    def _end_driver(self, driver: Process) -> None:
        driver.daemon.process_ended(driver, 0)

    def kill_head(self) -> None:
        for daemon in self.daemons:
            if daemon.node is None and self.head.recovery.over:
                daemon.given_up()
            daemon.lose_session()
        self.restart_head()

    def restart_head(self) -> None:
        saved = self.disk.restart(self.random.randint(0, self.disk.unwritten))
        timers = Clock()
        timers.now = self.timers.now + self.random.choice([0.5, 2.5, 5.0])
        self.timers = timers
        self.head = Head(HeadIdentity("test", self.disk.epoch, "here"), timers, self.disk)
        self.head.recovery.restore(saved)

    def break_session(self) -> None:
        daemon = self.random.choice(self.daemons)
        if daemon.node is not None:
            node, _, _ = daemon.node, daemon.lose_session(), daemon.given_up()
            self.head.lose(node, "its session broke")

    def rejoin(self) -> None:
        away = [daemon for daemon in self.daemons if daemon.node is None]
        if away:
            self.random.choice(away).join()

    def add_node(self) -> None:
        daemon = Daemon(self)
        self.daemons.append(daemon)
        daemon.join()

    def kill_node(self) -> None:
        daemon = self.random.choice(self.daemons)
        self.daemons.remove(daemon)
        # Nobody asks the next head again for an end that this one may not have kept.
        for id in [id for id, asker in self.over.items() if asker is daemon]:
            if not self.disk.has_ended(id):
                del self.over[id]
        node = daemon.node
        daemon.given_up()
        if node is not None:
            daemon.lose_session()
            self.head.lose(node, "killed")
        for process_id in list(daemon.processes):
            del daemon.processes[process_id]
            self.process_gone(process_id)
        self.add_node()

    # --- the end -----------------------------------------------------------------
    def release_all(self) -> None:
        """Everybody lets go of everything, and all that is on its way arrives."""
        for _ in range(4):
            for daemon in self.daemons:
                if daemon.node is None:
                    daemon.join()
            self.settle()
            there = [*self.head.cluster.placement_groups.all(), *self.head.cluster.actors.all()]
            if any(each.id in self.over for each in there):
                self.wrong.append(
                    f"there again: {[each.id.hex() for each in there if each.id in self.over]}"
                )
            last = self.daemons[0].attach()
            for method, id in self.detached:
                last.ask(method, id, *([True] if method == "kill_actor" else []))
            for process in self.processes():
                for group, spec in process.specs.items():
                    process.want(group, spec, 0)
                for number in list(process.held):
                    process.give_back(number)
                for id, _ in process.groups:
                    process.ask("remove_placement_group", id)
                for id in process.actors:
                    process.ask("kill_actor", id, True)
                process.groups.clear()
                process.actors.clear()
            self.settle()
            for process in self.drivers():
                process.daemon.process_ended(process, 0)
            self.settle()
            self.timers.pass_time(20)

    def settle(self) -> None:
        """All messages arrive, all that is to end ends, all that is to start starts."""
        for _ in range(1000):
            busy = False
            for daemon in self.daemons:
                busy = busy or bool(daemon.queue or daemon.up or daemon.down)
                daemon.deliver_up(10_000)
                daemon.deliver_down(10_000)
                for lease in list(daemon.leases.values()):
                    if lease.ending:
                        daemon.end(lease, -9)
                        busy = True
                    elif lease.process is None:
                        daemon.ready(lease)
                        busy = True
            if not busy:
                return
        raise AssertionError("messages go on without end")
