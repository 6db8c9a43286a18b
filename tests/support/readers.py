"""Every reader of files that others write, with a good file and the damage that suits it."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prismscale.analysis.emulated import Emulated
from prismscale.cluster import Cluster
from prismscale.cost.kernel_measured import KernelTable
from prismscale.cost.variability import VariabilityProfile
from prismscale.devices.routing_text import parse_routing
from prismscale.diagnosis.finding import diagnose
from prismscale.durations.scenario import Scenario
from prismscale.forecast.fleet import Fleet
from prismscale.forecast.placement.nodes import read_nodes, read_sniff_test
from prismscale.formats.chakra import read_chakra, write_chakra
from prismscale.formats.chakra.protobuf import read_messages, write_message
from prismscale.formats.flight_recorder.dump_reader import load_flight_record
from prismscale.formats.kineto import read_kineto
from prismscale.formats.nccl_tests import measured_from, parse_nccl_tests
from prismscale.formats.straggler import read_straggler
from prismscale.graph.io import load_graph, load_trace, save_graph, save_trace
from prismscale.payload.recorded import _read as read_payload
from prismscale.payload.rules.rule_file import RuleFile
from prismscale.progress import Terminal
from prismscale.sim.timeline import simulate
from prismscale.typed_files import text_of
from support import kineto_traces, straggler_traces
from support.damage import (
    bytes_damaged,
    json_damaged,
    rows_damaged,
    table_damaged,
    text_damaged,
    varints_damaged,
)
from support.foreign_reader import Reader, reader_of
from support.jobs import RecordedDurations, pipeline_job
from support.run_files import run_files
from support.traces import loop_trace

PRESETS = Path(__file__).parents[2] / "src" / "prismscale"


def all_readers(folder: Path) -> list[Reader]:
    """Readers with good files, which are made in ``folder``."""
    return [
        *_toml(),
        *_json(),
        *_lines(),
        *_traces(folder),
        *_tables(folder),
        *run_files(folder / "run"),
    ]


def _toml() -> list[Reader]:
    cluster = (PRESETS / "cost" / "profiles" / "h100-sxm.toml").read_bytes()
    profile = sorted((PRESETS / "cost" / "variability_profiles").glob("*.toml"))[0].read_bytes()
    fleet = sorted((PRESETS / "forecast" / "fleets").glob("*.toml"))[0].read_bytes()
    rules = (
        b'[[rule]]\nname = "sizes"\nop = ["broadcast"]\nmax_numel = 64\n'
        b'use = "token-ids"\nvocab = 50257\n'
    )
    return [
        reader_of("cluster", "c.toml", cluster, Cluster.load, text_damaged),
        reader_of("variability", "v.toml", profile, VariabilityProfile.load, text_damaged),
        reader_of("fleet", "f.toml", fleet, lambda path: Fleet.load(str(path)), text_damaged),
        reader_of("rules", "r.toml", rules, lambda path: RuleFile.parse(str(path)), text_damaged),
    ]


def _json() -> list[Reader]:
    kernel = {"signature": "aten::mm", "device_ns": 10, "host_ns": 5, "spread": 0.1}
    table = {
        "version": 1,
        "device": "NVIDIA H100 80GB HBM3",
        "torch": "2.13.0",
        "date": "2026-01-31",
        "kernels": [kernel, kernel | {"signature": "aten::add"}],
        "left_out": {"mine::scale": "why"},
    }
    use = {
        "signature": "aten::mm",
        "kind": "gemm",
        "source": "modelled",
        "calls": 3,
        "device_ns": 9,
        "host_ns": 1,
        "error": 0.1,
    }
    emulated = {"kernels": [use], "values": [], "checkpoints": [], "libraries": []}
    both = (json_damaged, text_damaged)
    return [
        reader_of("kernel times", "k.json", _dumped(table), KernelTable.load, *both),
        reader_of("null device", "n.json", _dumped(emulated), Emulated.load, *both),
        reader_of("scenario", "scenario.json", _scenario(), Scenario.load, *both),
        reader_of("flight record, JSON", "dump_0.json", _dumped(FLIGHT), _diagnosed, *both),
        reader_of(
            "flight record", "dump_0", pickle.dumps(FLIGHT, protocol=2), _diagnosed, varints_damaged
        ),
    ]


def _scenario() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "scenario.json"
        Scenario(cluster=Cluster.load("h100-sxm")).save(path)
        return path.read_bytes()


FLIGHT: dict[str, Any] = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {
            "record_id": n,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": n + 1,
            "p2p_seq_id": 0,
            "op_id": n,
            "profiling_name": "nccl:send 0->1" if n == 2 else "nccl:all_reduce",
            "input_sizes": [[3, 4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[3, 4]],
            "output_dtypes": ["Float"],
            "state": "completed" if n < 2 else "started",
            "frames": [{"name": "step", "filename": "/home/me/train.py", "line": 12}],
            "is_p2p": n == 2,
        }
        for n in range(4)
    ],
}


def _diagnosed(path: Path) -> str:
    """What the terminal shows."""
    shown = io.StringIO()
    found = diagnose(load_flight_record(path.parent))
    Terminal(file=shown, width=100, markup=False, highlight=False).print(found.text())
    return shown.getvalue()


def _dumped(value: object) -> bytes:
    return json.dumps(value).encode()


SNIFF = b"""GPU sniff test
GEMM throughput [TFLOPS]: median=610.5, mean=600.1
OUTLIER rank 3 (node-7): 400.0 below
"""
NCCL = b"""# nThread 1 nGpus 2
#  Rank  0 Group  0 Pid 1 on host-a device  0
#  Rank  1 Group  0 Pid 2 on host-a device  1
all_reduce_perf
 1048576 262144 float sum -1 27.37 38.31 67.04 0 27.0 38.8 67.9 0
 2097152 524288 float sum -1 40.37 51.31 89.04 0 41.0 50.8 88.9 0
"""


def _lines() -> list[Reader]:
    nodes = b"node,factor\na,1.0\nb,1.25\nc,0.98\n"
    loads = b"0.1\n0.2\n0.3\n0.4\n"
    payload = b'[{"dtype": "int64", "shape": [2, 1]}, {"dtype": "bool", "shape": [3]}]\n' + bytes(
        19
    )

    def measured(path: Path) -> object:
        return measured_from(parse_nccl_tests(text_of(path)), machine="m", date="d")

    return [
        reader_of("nodes", "n.csv", nodes, read_nodes, rows_damaged, text_damaged),
        reader_of("sniff test", "s.log", SNIFF, lambda p: read_sniff_test(p, 8, 4), text_damaged),
        reader_of("nccl-tests", "n.txt", NCCL, measured, text_damaged),
        reader_of("routing", "l.csv", loads, lambda p: parse_routing(str(p)), rows_damaged),
        reader_of("payload", "p.bin", payload, read_payload, text_damaged),
    ]


def _traces(folder: Path) -> list[Reader]:
    kineto = kineto_traces.two_ranks(folder)
    (folder / "et").mkdir()
    graph = pipeline_job(2, 1, 1, 2)
    durations = RecordedDurations(graph)
    timeline = simulate(graph, durations, steps=1, ranks=range(2))
    chakra = write_chakra(graph, timeline, durations, folder / "et")
    files = {p.name: _without_groups(p) for p in (folder / "et").iterdir()}

    def whole(path: Path) -> object:
        return read_chakra(sorted(path.parent.glob("*.et")))

    return [
        _kineto(kineto),
        *(
            Reader(
                name=f"Chakra, {name.rpartition('.')[2]}",
                format="text",
                path=name,
                files=files,
                damages=damages,
                read=whole,
            )
            for name, damages in (
                (chakra[0].name, (varints_damaged, bytes_damaged)),
                ("comm_group.json", (json_damaged, text_damaged)),
            )
        ),
    ]


def _without_groups(path: Path) -> bytes:
    """A Chakra file that leaves groups to ``comm_group.json``, as others' do."""
    if path.suffix != ".et":
        return path.read_bytes()
    found = io.BytesIO()
    with path.open("rb") as file:
        for message in read_messages(path.name, file):
            for attr in list(message.attr):
                if attr.name == "process_groups":
                    message.attr.remove(attr)
            write_message(found, message)
    return found.getvalue()


def _kineto(paths: list[Path]) -> Reader:
    files = {
        f"{n}.json": gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()
        for n, p in enumerate(paths)
    }
    return Reader(
        name="Kineto",
        format="text",
        path="0.json",
        files=files,
        damages=(json_damaged, text_damaged, bytes_damaged),
        read=lambda path: read_kineto(sorted(path.parent.glob("*.json"))),
    )


def _tables(folder: Path) -> list[Reader]:
    straggler = straggler_traces.write(straggler_traces.make_rows(), folder / "trace-a.parquet")
    save_trace(loop_trace(4, 64), folder / "rank-0.parquet")
    save_graph(pipeline_job(2, 2, 1, 2), folder / "graph")
    graph = {p.name: p.read_bytes() for p in (folder / "graph").iterdir() if p.is_file()}
    damages = (table_damaged, bytes_damaged)
    return [
        reader_of("straggler", "t.parquet", straggler.read_bytes(), read_straggler, table_damaged),
        reader_of(
            "trace",
            "rank-0.parquet",
            (folder / "rank-0.parquet").read_bytes(),
            load_trace,
            table_damaged,
        ),
        *(
            Reader(
                name=f"graph, {name}",
                format="Parquet",
                path=name,
                files=graph,
                damages=damages,
                read=lambda path: load_graph(path.parent),
            )
            for name in sorted(graph)
            if name.endswith(".parquet")
        ),
    ]
