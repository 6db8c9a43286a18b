"""Runs a recipe of a Megatron-Bridge release as its launcher would.

    python bridge_launch.py SCRIPTS --model_family_name … [options of run_script.py]

SCRIPTS is ``scripts/performance`` of a checkout at a release up to 0.5. Its launcher submits jobs
to Slurm, with an environment and options that depend on the recipe. They are asked of the
launcher's own functions here, and the program that it would submit takes the place of this one.
Later releases bring such a program along (``bootstrap.py``).
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

GPUS_A_NODE = {"gb200": 4, "gb300": 4}
"""Others have 8."""


def main() -> None:
    """Run the program."""
    scripts, *options = sys.argv[1:]
    sys.path.insert(0, scripts)
    environment, more = additions(options)
    os.environ.update(environment)
    program = str(Path(scripts, "run_script.py"))
    os.execvpe(sys.executable, [sys.executable, program, *options, *more], os.environ)


def additions(options: list[str]) -> tuple[dict[str, str], list[str]]:
    """Environment and options that the launcher adds."""
    nemo_run = importlib.import_module("nemo_run")
    executors = importlib.import_module("utils.executors")
    plugins = importlib.import_module("perf_plugins")
    asked, _ = importlib.import_module("argument_parser").parse_cli_args().parse_known_args(options)
    per_node = GPUS_A_NODE.get(asked.gpu, 8)
    with tempfile.TemporaryDirectory() as logs:
        executor = executors.slurm_executor(
            gpu=asked.gpu,
            account="none",
            partition="none",
            log_dir=logs,
            nodes=-(asked.num_gpus // -per_node),
            num_gpus_per_node=per_node,
        )
    script = nemo_run.Script(path="run_script.py", args=[])
    known = {field.name for field in fields(plugins.PerfEnvPlugin)}
    settings = {name: value for name, value in vars(asked).items() if name in known}
    plugin = plugins.PerfEnvPlugin(**settings, train_task=asked.task)
    plugin.setup(script, executor)
    kept = {name: str(value) for name, value in executor.env_vars.items() if name not in os.environ}
    return kept, [str(option) for option in script.args]


if __name__ == "__main__":
    main()
