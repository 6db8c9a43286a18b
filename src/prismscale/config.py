"""The configuration of one ``prismscale run``, checked before anything starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prismscale.analysis.payload_use import PayloadKind
from prismscale.capture.capture_spec import DEVICES
from prismscale.cluster import Cluster
from prismscale.cost.kernel import KernelModel
from prismscale.cost.kernel_measured import KernelCostSource
from prismscale.devices.null.compiled.availability import has_triton
from prismscale.devices.null.gpus import target_gpu
from prismscale.devices.routing import Routing
from prismscale.devices.stand_in_file import StandInFile
from prismscale.devices.storage import Storage
from prismscale.durations.faults import Faults
from prismscale.durations.recosting import CostSettings
from prismscale.durations.scenario import Scenario, check_compute_scale
from prismscale.durations.what_if.combined import WhatIfs
from prismscale.emulation.script import Script
from prismscale.emulation.surroundings import surroundings
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.errors import UsageError, did_you_mean
from prismscale.graph.parquet import MAX_WORLD_SIZE, VERSION
from prismscale.live.live_spec import CLOCKS, refuse_unfelt, refuse_virtual_gpu
from prismscale.payload.recordings.blob_store import LIMIT_BYTES
from prismscale.payload.recordings.selection import RecordSelection
from prismscale.payload.rules.rule_file import RuleFile
from prismscale.transfers.transfer_settings import TransferSettings

MOST_REAL = 1024
"""Largest world size with real values, where one machine holds a process for every rank."""
VALUES = ("answered", "real")
"""``answered``: a captured rank runs alone, and rules make up what the others would send.
``real``: all ranks run, a few at a time, and receive what the others really send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """One job: the program, the target cluster, and how many ranks and steps to look at."""

    script: Script
    world_size: int
    cluster: str
    """Preset name or TOML path."""
    out: Path
    """Run folder."""
    live: tuple[int, ...] = ()
    live_on: tuple[int, ...] = ()
    """A device of this machine, a core or a GPU, for each live rank; empty: any."""
    attach: int | None = None
    """The live rank whose process has the terminal."""
    device: str = "cpu"
    clock: str = "paced"
    samples: int = 4
    """Steady steps measured in each capture."""
    watched_steps: int = 12
    """Number of steps in which a captured rank of a null device is watched for periodic events."""
    steps: int = 8
    """Steady steps that each live rank runs."""
    shown: tuple[int, ...] = ()
    """Ranks on the timeline besides the live ranks and one rank of each stage."""
    step_marker: str | None = None
    max_captures: int = 128
    capture: tuple[int, ...] = ()
    """Ranks to capture besides those that are needed."""
    quick: bool = False
    """Capture fewer ranks (see :attr:`CapturePlanner.quick`), and watch for no periodic events."""
    check_s: float = 0.0
    """Seconds to spend on capturing the first steps of further ranks; 0: none."""
    capture_timeout_s: float = 1800.0
    memory: bool = True
    values: str = "answered"
    """Where the values of other ranks come from: one of :data:`VALUES`."""
    slots: int = 0
    """With real values, number of ranks that run at a time; 0: one per core."""
    record: tuple[str, ...] = ()
    """With real values, selections of communications to record for live ranks."""
    record_limit_bytes: int = LIMIT_BYTES
    trusts_objects: bool = False
    """Unpickle objects from the run folder no matter who pickled them."""
    transfers: TransferSettings = field(default_factory=TransferSettings)
    """Whether live ranks really send the bytes that a rank of the job sends."""
    budget_bytes: int = 0
    """With real values, memory that all ranks may take together; 0: as much as they need."""
    fresh: bool = False
    compute_scale: float = 1.0
    kernels: Path | None = None
    """File of measured kernel times; they take precedence over a null device's model."""
    fused: bool = False
    """On a null device, lower no compiled regions: a fusion rule costs their elementwise work."""
    routing: Routing = field(default_factory=Routing)
    """Tokens by expert. A device that computes routes as the program does unless this is given."""
    stand_ins: tuple[StandInFile, ...] = ()
    """On a null device, stand-ins for extensions that exist only as CUDA binaries."""
    storage: Storage = field(default_factory=Storage)
    """Storage to which each rank of a null device writes its checkpoints."""
    payload: str = ""
    """First source of the values that absent peers contribute: a :class:`PayloadKind`.
    Empty: the user's rules if there are any, else the values that captured ranks sent."""
    rules: RuleFile | None = None
    """The user's rules for these values."""
    variability: str | None = None
    """Variability profile for forecasts of a null run; None: the cluster's."""
    slow: Mapping[int, float] = field(default_factory=dict)
    hang: Mapping[int, int] = field(default_factory=dict)
    what_ifs: tuple[str, ...] = ()
    """Hypothetical changes of the program or the cluster."""

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise UsageError(f"world size is {self.world_size}; allowed: 1 … {MAX_WORLD_SIZE:,}")
        _choice("device", self.device, DEVICES)
        _choice("clock", self.clock, CLOCKS)
        self._check_values()
        self._check_payload()
        self._check_transfers()
        refuse_virtual_gpu(self.clock, self.device)
        for rank in (*self.live, *self.shown, *self.capture):
            if not 0 <= rank < self.world_size:
                raise UsageError(
                    f"rank {rank} does not exist in a world of {self.world_size}; ranks are "
                    f"0 … {self.world_size - 1}"
                )
        if len(set(self.live)) != len(self.live):
            raise UsageError(f"--live names a rank twice: {', '.join(map(str, self.live))}")
        if self.live_on and (self.device == "null" or len(self.live_on) != len(self.live)):
            raise UsageError(
                f"{len(self.live_on)} devices for {len(self.live)} live ranks on --device "
                f"{self.device}; give one each, on cpu or cuda"
            )
        if self.attach is not None and self.attach not in self.live:
            raise UsageError(f"--attach {self.attach}: give that rank to --live too")
        for name, value in (("samples", self.samples), ("steps", self.steps)):
            if not 1 <= value <= 100_000:
                raise UsageError(f"--{name} is {value}; allowed: 1 … 100,000")
        check_compute_scale(self.compute_scale)
        if self.device != "null" and (self.kernels is not None or self.fused):
            given = "--kernels" if self.kernels is not None else "--fused"
            raise UsageError(f"{given} models the kernels of --device null, not of {self.device}")
        if self.device != "null" and self.stand_ins:
            raise UsageError(
                f"--stand-in is of --device null; on {self.device} the extension itself is imported"
            )
        if not 0 <= self.watched_steps <= 10_000:
            raise UsageError(f"--watch-steps is {self.watched_steps}; allowed: 0 … 10,000")
        if self.max_captures < 1:
            raise UsageError(f"--max-captures is {self.max_captures}; allowed: 1 or more")
        if not 0 <= self.check_s < 1e7:
            raise UsageError(f"--check is {self.check_s:g} s; allowed: 0 … 10,000,000")
        if self.values == "real" and (self.check_s or self.capture or self.quick):
            given = "--check" if self.check_s else "--capture" if self.capture else "--quick"
            raise UsageError(
                f"{given} chooses the ranks to look at; with --values real all are looked at"
            )
        if self.quick and self.check_s:
            raise UsageError("--check looks at more ranks, and --quick at fewer: give one of them")
        if not self.capture_timeout_s > 0:
            raise UsageError(f"--capture-timeout is {self.capture_timeout_s}; allowed: above 0")
        self.faults.check(self.world_size)
        refuse_unfelt(WhatIfs.parse(self.what_ifs), self.live, self.device)

    def _check_values(self) -> None:
        _choice("values", self.values, VALUES)
        if self.values == "real" and self.device != "cpu":
            raise UsageError(
                f"--values real is of --device cpu: {self.device} holds no values of many ranks"
            )
        if self.slots < 0 or (self.slots and self.values != "real"):
            raise UsageError(f"--slots is {self.slots}; give 1 or more, with --values real")
        if self.budget_bytes < 0 or (self.budget_bytes and self.values != "real"):
            raise UsageError(
                f"--memory is {self.budget_bytes:,} bytes; give a size such as 8GiB, with "
                "--values real"
            )
        if self.values == "real" and self.world_size > MOST_REAL:
            raise UsageError(
                f"--values real runs every rank, and there are {self.world_size:,}; allowed: up to "
                f"{MOST_REAL:,}. Without it a few ranks stand for all"
            )

    def _check_transfers(self) -> None:
        if self.record and self.values != "real":
            raise UsageError(
                f"--record {self.record[0]!r}: only --values real has anything to record, because "
                "all ranks run there"
            )
        for text in self.record:
            RecordSelection.parse(text)
        if self.record_limit_bytes <= 0:
            limit = self.record_limit_bytes / (1 << 30)
            raise UsageError(f"--record-limit is {limit:g} GiB; allowed: above 0")
        if self.transfers.are_real and not self.live:
            raise UsageError(
                f"--transfers {self.transfers.kind}: only live ranks send anything; name some with "
                "--live"
            )
        if self.transfers.are_real and self.device != "cpu":
            raise UsageError(
                f"--transfers {self.transfers.kind} is of --device cpu: what a live rank on "
                f"{self.device} would send goes over links that are not here"
            )

    def _check_payload(self) -> None:
        if self.payload:
            _choice("payload", self.payload, tuple(kind.value for kind in PayloadKind))
        by_rules = self.payload_kind is PayloadKind.RULES
        if by_rules and self.rules is None:
            raise UsageError("--payload rules: give the rules too, --rules FILE")
        if self.rules is not None and not by_rules:
            raise UsageError(
                f"--payload {self.payload} asks no rules: leave out --rules {self.rules.path}"
            )
        if self.values == "real" and (self.payload or self.rules):
            given = "--rules" if self.rules else "--payload"
            raise UsageError(
                f"{given} is about ranks that are not there; with --values real all are"
            )

    @property
    def steps_to_watch(self) -> int:
        """Number of steps in which a captured rank is watched for periodic events."""
        return 0 if self.quick else self.watched_steps

    @property
    def payload_kind(self) -> PayloadKind:
        """The first source of the values that absent peers contribute."""
        if self.payload:
            return PayloadKind(self.payload)
        return PayloadKind.RULES if self.rules else PayloadKind.RECORDED

    @property
    def faults(self) -> Faults:
        """Slow and hung ranks."""
        return Faults(slow=dict(self.slow), hang=dict(self.hang))

    def scenario(self, cluster: Cluster, captures: str) -> Scenario:
        """Return the scenario that times the job's graph.

        ``captures`` is the folder, in the run folder, of the traces that the graph was made of.
        """
        table = str(self.kernels.absolute()) if self.kernels else ""
        costs = CostSettings(kernels=table, fused=self.fused)
        scenario = Scenario(
            cluster=cluster,
            compute_scale=self.compute_scale,
            faults=self.faults,
            kernel_costs=costs if self.device == "null" else None,
            captures=captures,
            what_ifs=self.what_ifs,
        )
        named = cluster.variability if self.device == "null" else ""
        given = self.variability if self.variability is not None else named
        return scenario.changed(variability=given) if given else scenario

    def load_cluster(self) -> Cluster:
        """Return the target cluster.

        Raises:
            UsageError: no cluster has that name, the world does not fill its nodes, a null device
                cannot emulate its GPU, the kernel times belong to another GPU, or there is no such
                variability profile.
            FormatError: the file of kernel times, or the profile, cannot be read.
        """
        cluster = Cluster.load(self.cluster)
        RankEnvironment(
            rank=0, world_size=self.world_size, local_world_size=cluster.devices_per_node
        )
        if self.device == "null":
            self._kernel_model(cluster)
        self.scenario(cluster, "")  # raises if the variability profile cannot be used
        return cluster

    def _kernel_model(self, cluster: Cluster) -> KernelModel:
        target_gpu(cluster.device, devices_per_node=cluster.devices_per_node)
        table = str(self.kernels) if self.kernels else ""
        return KernelCostSource(table=table, fused=self.fused).model(cluster.device)

    def capture_key(self, cluster: Cluster) -> str:
        """Return a key that changes whenever earlier captures can no longer be used.

        It covers the program, its arguments, its surroundings, the world, the device and the
        measurement.
        """
        sources = [hashlib.sha256(f.read_bytes()).hexdigest() for f in self.script.sources()]
        parts = [
            # Files of an earlier format stay where they are, and are not read.
            VERSION,
            # See payload/object_marks.py and payload/recorded.py.
            "objects have marks, and numbers of their own",
            self.script.label,
            "".join(sources),
            list(self.script.args),
            surroundings(self.script),
            self.world_size,
            cluster.devices_per_node,
            cluster.processor_communicates,
            self.device,
            # A null device's trace holds costs: another profile or table makes another trace.
            repr((cluster.device, self._kernel_model(cluster))) if self.device == "null" else "",
            self.device == "null" and has_triton(),  # without Triton compiled regions run eagerly
            self.samples,
            self.step_marker,
            self.memory,
            self.values,
            list(self.record),
            self.steps_to_watch,
            self.storage.write_bytes_per_s,
            repr(self.routing),
            [stand_in.digest for stand_in in self.stand_ins],
            self.payload_kind.value,
            self.rules.digest if self.rules else "",
        ]
        return _digest(parts)

    def live_key(self, cluster: Cluster) -> str:
        """Return a key that changes whenever live ranks would behave differently than before."""
        parts = [
            self.capture_key(cluster),
            repr(cluster),
            list(self.live),
            list(self.live_on),
            self.clock,
            self.steps,
            self.compute_scale,
            sorted(self.slow.items()),
            sorted(self.hang.items()),
            list(self.what_ifs),
            repr(self.transfers),
            self.trusts_objects,
        ]
        return _digest(parts)


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _choice(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise UsageError(f"--{name} {given!r}; {did_you_mean(given, allowed)}")
