"""A cluster in a box: machines with equal CPU shares, each behind a network link of its own.

A machine is a place for one rank's process: a control group with a CPU quota, one core, and a
network namespace whose only interface leads over a rate-limited link to a bridge. The bridge lives
in a namespace too, so nothing is added to the machine's own network and no packet can leave the
box. Needs Linux, root, a cgroup ``cpu`` controller (version 1 or 2) and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from prismscale.errors import UsageError

INTERFACE = "net0"
"""Name of a machine's network interface."""
BRIDGE = "bridge0"
NAMESPACES = Path("/run/netns")
LARGEST_SEGMENT_BYTES = 32_768
BURST_BYTES = 49_152
"""What a link lets through at once: a segment, or the kernel would cut each one to packets."""
QUEUE_MS = 50
SMALLEST_QUOTA_US = 1_000
"""The kernel's own limit."""
REMOVAL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSpec:
    """The size of a box."""

    machines: int
    core_share: float
    """Of one core, for each machine."""
    rate_mbit: int
    """Of each machine's link, in each direction, in Mbit/s."""
    period_us: int = 10_000
    """Of the quota: short against a step, so that a machine is slow and not intermittent."""

    def __post_init__(self) -> None:
        if not 1 <= self.machines <= 200 or self.rate_mbit < 1:
            raise UsageError(
                f"{self.machines} machines at {self.rate_mbit} Mbit/s; 1 to 200, 1 or more"
            )
        if not 0 < self.core_share <= 1 or self.quota_us < SMALLEST_QUOTA_US:
            least = SMALLEST_QUOTA_US / self.period_us
            raise UsageError(
                f"a share of {self.core_share:g} cores a machine; allowed: {least:g} to 1, so use "
                "fewer ranks or a longer period"
            )

    @property
    def quota_us(self) -> int:
        """CPU time of a machine in each period."""
        return int(self.core_share * self.period_us)


@dataclass(kw_only=True)
class CpuGroups:
    """Control groups of one box."""

    root: Path
    """Where the ``cpu`` controller is mounted."""
    version: int
    _made: list[Path] = field(default_factory=list)

    @staticmethod
    def find() -> CpuGroups:
        """The mounted ``cpu`` controller.

        Raises:
            UsageError: there is none that we may use.
        """
        for line in Path("/proc/mounts").read_text().splitlines():
            _, place, kind, options, *_ = line.split()
            if kind == "cgroup" and "cpu" in options.split(","):
                return CpuGroups(root=Path(place), version=1)
            controllers = Path(place) / "cgroup.controllers"
            if kind == "cgroup2" and "cpu" in controllers.read_text().split():
                return CpuGroups(root=Path(place), version=2)
        raise UsageError("no cgroup cpu controller is mounted: CPU shares cannot be limited here")

    def make_parent(self, name: str, machines: int) -> None:
        """A new group for all machines, which together weigh as much as so many processes.

        Raises:
            UsageError: the kernel refuses.
        """
        if self.version == 2:
            self._make(name, {"cpu.weight": str(min(100 * machines, 10_000))})
        else:
            self._make(name, {"cpu.shares": str(1024 * machines)})

    def make_machine(self, name: str, spec: BoxSpec) -> Path:
        """A new group that is limited to one machine's share; returns the file that lets one in.

        Raises:
            UsageError: the kernel refuses.
        """
        limits = {"cpu.cfs_period_us": str(spec.period_us), "cpu.cfs_quota_us": str(spec.quota_us)}
        if self.version == 2:
            limits = {"cpu.max": f"{spec.quota_us} {spec.period_us}"}
        return self._make(name, limits) / "cgroup.procs"

    @staticmethod
    def _end_processes(group: Path) -> None:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _make(self, name: str, settings: dict[str, str]) -> Path:
        group = self.root / name
        try:
            if self.version == 2:
                _write(group.parent / "cgroup.subtree_control", "+cpu")
            self._made.append(group)
            group.mkdir()
            for key, value in settings.items():
                _write(group / key, value)
        except OSError as error:
            raise UsageError(
                f"cannot make a control group at {group}: {error.strerror}; run as root, outside "
                "of a container or in a privileged one"
            ) from error
        return group

    def remove(self) -> None:
        """Remove all groups, and end the processes that are still in one."""
        deadline = time.monotonic() + REMOVAL_S
        for group in reversed(self._made):
            while group.exists():
                try:
                    group.rmdir()
                except OSError:
                    self._end_processes(group)
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
        self._made.clear()


class Box:
    """A context in which machines exist; leaving it removes everything that it made."""

    def __init__(self, spec: BoxSpec) -> None:
        """Check what the machine offers.

        Raises:
            UsageError: not root, no iproute2, or no cgroup ``cpu`` controller.
        """
        if os.geteuid() != 0:
            raise UsageError("a cluster in a box needs root: it makes namespaces and cgroups")
        missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
        if missing:
            raise UsageError(
                f"{', '.join(missing)} not found: install iproute2 and util-linux "
                "(apt-get install -y iproute2 util-linux)"
            )
        self.spec = spec
        self._name = f"prismscale-box-{os.getpid()}"
        self._cores = sorted(os.sched_getaffinity(0))
        self._groups = CpuGroups.find()
        self._started = 0
        self._undo = ExitStack()

    def __enter__(self) -> Box:
        with ExitStack() as stack:
            stack.callback(self._groups.remove)
            self._groups.make_parent(self._name, self.spec.machines)
            self._make_network(stack)
            self._undo = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    @staticmethod
    def address(machine: int) -> str:
        """IP address of a machine's interface."""
        return f"10.77.0.{machine + 1}"

    def prefix(self, machine: int) -> list[str]:
        """Words before a command that let it run on ``machine``, under a quota of its own.

        All of them replace themselves by the command: the process keeps its id and its parent.
        """
        self._started += 1
        door = self._groups.make_machine(f"{self._name}/{self._started}", self.spec)
        join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(door)]
        pin = ["taskset", "--cpu-list", str(self._cores[machine % len(self._cores)])]
        return [*join, *pin, "ip", "netns", "exec", self._namespace(machine)]

    def _namespace(self, machine: int) -> str:
        return f"{self._name}-{machine}"

    def _make_network(self, stack: ExitStack) -> None:
        hub = f"{self._name}-hub"
        self._add_namespace(hub, stack)
        _call("ip", "-n", hub, "link", "add", BRIDGE, "type", "bridge")
        _call("ip", "-n", hub, "link", "set", BRIDGE, "up")
        for machine in range(self.spec.machines):
            self._add_namespace(self._namespace(machine), stack)
            self._connect(machine, hub)

    @staticmethod
    def _add_namespace(name: str, stack: ExitStack) -> None:
        # First what undoes it: an interrupt may come between the two.
        stack.callback(_remove_namespace, name)
        _call("ip", "netns", "add", name)

    def _connect(self, machine: int, hub: str) -> None:
        inside, port = ["-n", self._namespace(machine)], f"port{machine}"
        peer = ["peer", "name", port, "netns", hub]
        segment = ["gso_max_size", str(LARGEST_SEGMENT_BYTES)]
        _call("ip", *inside, "link", "set", "lo", "up")
        _call("ip", *inside, "link", "add", INTERFACE, "type", "veth", *peer)
        _call("ip", *inside, "address", "add", f"{self.address(machine)}/24", "dev", INTERFACE)
        _call("ip", *inside, "link", "set", INTERFACE, *segment, "up")
        _call("ip", "-n", hub, "link", "set", port, "master", BRIDGE, "up")
        # Towards the bridge and from it: a link is as fast in one direction as in the other.
        self._limit_rate(self._namespace(machine), INTERFACE)
        self._limit_rate(hub, port)

    def _limit_rate(self, namespace: str, interface: str) -> None:
        rate, burst = f"{self.spec.rate_mbit}mbit", str(BURST_BYTES)
        limits = ["tbf", "rate", rate, "burst", burst, "latency", f"{QUEUE_MS}ms"]
        _call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limits)


def _remove_namespace(name: str) -> None:
    if (NAMESPACES / name).exists():
        _call("ip", "netns", "del", name)


def _call(*command: str) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")


def _write(path: Path, text: str) -> None:
    # Unbuffered: the kernel answers at the write itself.
    with path.open("wb", buffering=0) as file:
        file.write(text.encode())
