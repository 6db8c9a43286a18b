"""The command-line options of ``prismscale run``.

The options are the parameters of :func:`job_config`. ``run`` and other commands that make runs get
them by :func:`with_options_of`. :func:`parse` reads a list of arguments as ``run`` does, and
:func:`option_arguments` writes one.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.main

from prismscale.api import DEFAULT_OUT
from prismscale.config import JobConfig
from prismscale.devices.routing_text import parse_routing
from prismscale.devices.stand_in_file import StandInFile
from prismscale.devices.storage import WRITE_BYTES_PER_S, Storage
from prismscale.durations.slow_ranks import slow_ranks
from prismscale.errors import UsageError
from prismscale.graph.parquet import MAX_WORLD_SIZE
from prismscale.payload.recordings.blob_store import LIMIT_BYTES
from prismscale.payload.rules.rule_file import RuleFile
from prismscale.program_arguments import (
    OPEN,
    USUAL_CLUSTER,
    ModuleOption,
    ProgramArgument,
    ProgramCommand,
    script_of,
)
from prismscale.transfers.transfer_settings import EMULATED, TransferSettings

PROGRAM = "program"
"""The parameter that takes the script and its arguments."""
Command = TypeVar("Command", bound=Callable[..., Any])


def job_config(
    program: ProgramArgument = None,
    world_size: Annotated[
        int, typer.Option(help="Ranks of the target job.", show_default=False)
    ] = 0,
    cluster: Annotated[
        str, typer.Option(help="Target cluster: a preset's name or a TOML file.")
    ] = USUAL_CLUSTER,
    live: Annotated[
        str, typer.Option(help="Ranks to run live, for example 0,512.", show_default="none")
    ] = "",
    attach: Annotated[
        int | None,
        typer.Option(
            help="Live rank that gets the terminal: breakpoint() asks there.", show_default="none"
        ),
    ] = None,
    module: ModuleOption = "",
    out: Annotated[Path, typer.Option(help="Run folder.")] = DEFAULT_OUT,
    device: Annotated[
        str,
        typer.Option(help="Where programs compute: cpu, cuda, or null (a GPU that is not there)."),
    ] = "cpu",
    clock: Annotated[
        str, typer.Option(help="paced: waits take real time; virtual: they are skipped.")
    ] = "paced",
    steps: Annotated[int, typer.Option(help="Steady steps of each live rank.")] = 8,
    samples: Annotated[int, typer.Option(help="Steady steps measured in each capture.")] = 4,
    watch_steps: Annotated[
        int,
        typer.Option(
            help="Steps in which a null device's program is watched for what happens now and then."
        ),
    ] = 12,
    show: Annotated[
        str, typer.Option(help="More ranks on the timeline.", show_default="one a stage")
    ] = "",
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="Make ranks' computation slower: RANK=FACTOR, 8-15=FACTOR, or @FILE of such "
            "lines.",
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Something is otherwise, for live ranks too: kernel=REGEX xF, host=xF, "
            "overlap=GROUP off, link=nvlink|network xF, group=GROUP on network|nvlink, "
            "links=shared, compute=shared, recompute=off, dtype=fp8.",
            show_default=False,
        ),
    ] = None,
    hang: Annotated[
        list[str] | None,
        typer.Option(help="Stop a rank for ever: RANK@stepN.", show_default=False),
    ] = None,
    compute_scale: Annotated[float, typer.Option(help="Factor on all measured computation.")] = 1.0,
    kernels: Annotated[
        Path | None,
        typer.Option(
            help="Kernel times measured by profile-kernels, for --device null.",
            show_default="modelled",
        ),
    ] = None,
    fused: Annotated[
        bool,
        typer.Option(
            "--fused",
            help="Lower nothing that torch.compile is asked for: cost elementwise work by a rule "
            "of fusion, on --device null.",
        ),
    ] = False,
    routing: Annotated[
        str,
        typer.Option(
            help="Tokens by expert: uniform (on a device that computes, as the program routes), "
            "zipf:S, a preset over N ranks (balanced:N, mild:N, moderate:N, heavy:N, extreme:N), "
            "balance:ranks=N,max=1.5,… or a CSV file."
        ),
    ] = "uniform",
    stand_in: Annotated[
        list[str] | None,
        typer.Option(
            help="FILE.py or MODULE=FILE.py: imported in place of an extension that exists only as "
            "a CUDA binary, on --device null; repeatable.",
            show_default=False,
        ),
    ] = None,
    storage: Annotated[
        float, typer.Option(help="GB/s that each rank writes of a checkpoint, on --device null.")
    ] = WRITE_BYTES_PER_S / 1e9,
    variability: Annotated[
        str | None,
        typer.Option(
            help="Variability profile of forecasts on --device null: a preset's name, a TOML file, "
            "or none.",
            show_default="the cluster's",
        ),
    ] = None,
    step_marker: Annotated[
        str,
        typer.Option(
            help="module:function that ends a step; by default optimizer steps are found.",
            show_default=False,
        ),
    ] = "",
    max_captures: Annotated[int, typer.Option(help="Most ranks to capture.")] = 128,
    capture: Annotated[
        str,
        typer.Option(
            help="More ranks to capture, for example 3,16-23: to see a mistake that only these "
            "make, or, with fit, their memory.",
            show_default="none",
        ),
    ] = "",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Capture fewer ranks and steps: pipeline stages and the last rank, more where "
            "that one differs; nothing that happens only now and then.",
        ),
    ] = False,
    check: Annotated[
        str,
        typer.Option(
            help="Time for the first steps of further ranks, for example 90s, 5m or 1h.",
            show_default="none",
        ),
    ] = "",
    capture_timeout: Annotated[float, typer.Option(help="Seconds for one capture.")] = 1800.0,
    values: Annotated[
        str,
        typer.Option(
            help="What other ranks send: answered (made up by rules) or real (all ranks run, a few "
            "at a time)."
        ),
    ] = "answered",
    slots: Annotated[
        int,
        typer.Option(
            help="With --values real, ranks that run at a time.", show_default="one a core"
        ),
    ] = 0,
    record: Annotated[
        list[str] | None,
        typer.Option(
            help="With --values real, keep what ranks say for live ones: all, or "
            "'group=tp,step=3' (group, op, rank, step; 0-7 for several); repeatable.",
            show_default="nothing",
        ),
    ] = None,
    record_limit: Annotated[
        float, typer.Option(help="GiB that recordings may take on the disk.")
    ] = LIMIT_BYTES / (1 << 30),
    trust_objects: Annotated[
        bool,
        typer.Option(
            "--trust-objects",
            help="Unpickle what object collectives bring from a run folder that another user or "
            "machine made: whatever it says is executed.",
        ),
    ] = False,
    transfers: Annotated[
        str,
        typer.Option(
            help="What live ranks on --device cpu send: emulated (nothing), real (as gloo does, to "
            "each other and to assistants in their neighbours' place), or tree (real, with "
            "all-reduces in trees)."
        ),
    ] = EMULATED,
    netns: Annotated[
        list[str] | None,
        typer.Option(
            help="Network namespace of a live rank, RANK=NAME, or of the assistants, others=NAME, "
            "for --transfers real; repeatable.",
            show_default="all on loopback",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            "--memory",
            help="With --values real, memory that this command and all ranks may take together, "
            "such as 8GiB: ranks that are suspended are pressed out to disk.",
            show_default="what they need",
        ),
    ] = "",
    payload: Annotated[
        str,
        typer.Option(
            help="First source of what absent peers send: rules, recorded (what captured ranks "
            "sent), or mirror (what the rank itself does).",
            show_default="recorded, or rules with --rules",
        ),
    ] = "",
    rules: Annotated[
        str,
        typer.Option(
            help="FILE.py or FILE.toml with rules for what absent peers send.", show_default="none"
        ),
    ] = "",
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Do not track memory.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Redo stages that are done.")] = False,
) -> JobConfig:
    """The job that the options of ``prismscale run`` ask for.

    Raises:
        UsageError: an option, or a combination of them, that cannot be used.
    """
    live_ranks = ranks_of(live, "--live")
    return JobConfig(
        script=script_of(module, program or [], "prismscale run --world-size N"),
        world_size=_required_world_size(world_size),
        cluster=cluster,
        out=out,
        live=live_ranks,
        attach=attach,
        device=device,
        clock=clock,
        steps=steps,
        samples=samples,
        watched_steps=watch_steps,
        shown=ranks_of(show, "--show"),
        step_marker=step_marker or None,
        max_captures=max_captures,
        capture=ranks_of(capture, "--capture"),
        quick=quick,
        check_s=_seconds(check),
        capture_timeout_s=capture_timeout,
        memory=not no_memory,
        values=values,
        slots=slots,
        record=tuple(record or ()),
        record_limit_bytes=n_bytes("--record-limit", record_limit, 1 << 30),
        trusts_objects=trust_objects,
        transfers=TransferSettings.parse(transfers, netns or (), live_ranks),
        budget_bytes=_bytes(budget) if budget else 0,
        payload=payload,
        rules=RuleFile.parse(rules) if rules else None,
        fresh=fresh,
        compute_scale=compute_scale,
        kernels=kernels,
        fused=fused,
        routing=parse_routing(routing),
        stand_ins=tuple(StandInFile.parse(text) for text in stand_in or []),
        storage=Storage(write_bytes_per_s=storage * 1e9),
        variability=variability,
        slow=slow_ranks(slow or []),
        hang=dict(_hang(s) for s in hang or []),
        what_ifs=tuple(what_if or ()),
    )


def n_bytes(option: str, amount: float, unit: int) -> int:
    """Return an option's ``amount`` of ``unit`` bytes each.

    Raises:
        UsageError: it is not finite, or negative.
    """
    if not 0 <= amount < math.inf:
        raise UsageError(f"{option} is {amount}; give a number that is not negative")
    return round(amount * unit)


def with_options_of(
    source: Callable[..., Any], *, without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Return a decorator that adds the parameters of ``source`` to a command's own.

    The command takes them as ``**given``, after its own. Those in ``without`` are left out.
    """

    def give(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        named = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
        more = inspect.signature(source, eval_str=True).parameters.values()
        shared = [p for p in more if p.name not in without]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*named, *shared)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return give


@cache
def _parser() -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command("run", cls=ProgramCommand, context_settings=OPEN)(job_config)
    return typer.main.get_command(app)


def option_parameters() -> dict[str, Any]:
    """Return the parser's parameter of each option of ``run``, by option name (``--cluster``)."""
    options = (p for p in _parser().params if p.opts[0].startswith("-"))
    return {name: p for p in options for name in p.opts}


def parse(arguments: Sequence[str]) -> JobConfig:
    """Return the job that ``prismscale run`` with these arguments would run.

    Raises:
        UsageError: ``run`` would refuse the arguments.
    """
    try:
        config: JobConfig = _parser().main(
            list(arguments), prog_name="prismscale run", standalone_mode=False
        )
    except typer.TyperException as error:
        raise UsageError(error.format_message().rstrip(".")) from error
    return config


def option_arguments(given: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Iterate over the options of ``run`` that set :func:`job_config`'s parameters to ``given``.

    Each option comes with all its command-line words, its own name included. Parameters with their
    default value are left out.
    """
    for parameter in _parser().params:
        value = given.get(parameter.name, parameter.default)
        if parameter.name == PROGRAM or value in (parameter.default, None):
            continue
        name = parameter.opts[0]
        if parameter.is_flag:
            yield name, [name]
        elif parameter.multiple:
            yield name, [text for one in value for text in (name, str(one))]
        else:
            yield name, [name, str(value)]


def _required_world_size(given: int) -> int:
    if given == 0:
        raise UsageError(
            "--world-size is missing: how many ranks does the target job have? (or torchrun's "
            "--nnodes and --nproc-per-node)"
        )
    return given


def ranks_of(text: str, option: str) -> tuple[int, ...]:
    """Parse a list of ranks: ``0,8-10`` → (0, 8, 9, 10)."""
    return tuple(_expand(text.split(","), option)) if text else ()


def _expand(parts: Iterable[str], option: str) -> Iterable[int]:
    for part in parts:
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise UsageError(f"{option} {part!r} is not a rank; give for example 0,512 or 0-3")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < MAX_WORLD_SIZE:
            raise UsageError(f"{option} {part!r} is not a range of ranks; give for example 0-3")
        yield from range(first, last + 1)


def _seconds(text: str) -> float:
    """Parse a duration: ``5m`` → 300; ``90`` and ``90s`` → 90."""
    found = re.fullmatch(r"\s*(\d{1,7}(?:\.\d{1,3})?)\s*([smh]?)\s*", text)
    if text and found is None:
        raise UsageError(f"--check {text!r} is no time; give for example 90s, 5m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", text)
    if found is None:
        raise UsageError(f"--memory {text!r} is no size; give for example 8GiB or 500MB")
    unit = found[2] or ""
    power = "KMGT".index(unit[0]) + 1 if unit else 0
    return int(float(found[1]) * (1024 if unit.endswith("i") else 1000) ** power)


def _hang(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)@(?:step)?(\d+)", text)
    if found is None:
        raise UsageError(f"--hang {text!r}: give RANK@stepN, for example 17@step3")
    return int(found[1]), int(found[2])
