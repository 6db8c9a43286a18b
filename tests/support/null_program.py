"""Programs on a null device of their own: what a process can be only once."""

from __future__ import annotations

import os
import subprocess
import sys

_SWITCH_ON = """
from prismscale.devices.null.gpus import device_spec
from prismscale.devices.null.runtime import activate
activate(device_spec("{gpu}"){options})
"""

_END = "\nimport os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)\n"
"""As a rank's process ends: an autograd thread of torch that asks for the GIL while Python ends
aborts the process."""


def null_program(
    text: str,
    *,
    before: str = "",
    options: str = "",
    gpu: str = "h100-sxm",
    **environment: str,
) -> str:
    """What ``text`` prints on a null node of ``gpu`` that is switched on after ``before``."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # A null device in the tests' own process, which has no Triton, has switched dynamo off for it.
    inherited = {name: text for name, text in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-c", before + _SWITCH_ON.format(options=options, gpu=gpu) + text + _END],
        env=inherited | paths | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
