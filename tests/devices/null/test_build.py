"""Building and caching the extension, and choosing the GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from prismscale.cluster import Cluster
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.devices.null import build, runtime
from prismscale.devices.null.gpus import PRESETS, NullDeviceSpec, device_spec
from prismscale.errors import StorageError, UsageError


def test_the_extension_is_built_once() -> None:
    """A second call returns the cached file, keyed by torch's version."""
    path = build.build_extension()

    assert path == build.build_extension()
    # An index tells 2.14.1 of what calls itself 2.14.1+cu130.
    assert torch.__version__.partition("+")[0] in path.parent.name


def test_what_was_compiled_at_install_is_taken(monkeypatch, tmp_path) -> None:
    """An object in the package goes before the cache, which need not be there then."""
    built = build.build_extension()
    installed = tmp_path / "built" / built.parent.name / built.name
    installed.parent.mkdir(parents=True)
    installed.symlink_to(built)
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "built")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")

    assert build.is_built()
    assert build.build_extension() == installed


def test_the_command_compiles_without_importing_torch() -> None:
    """Whether there is something to compile is known at once: torch takes seconds to import."""
    code = (
        "import sys; from prismscale.devices.null import build; "
        "build.extension_path(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_a_missing_compiler_is_explained(monkeypatch, tmp_path) -> None:
    """Without a compiler the error names what to install."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match=r"apt-get install g\+\+"):
        build.build_extension()


def test_a_cache_that_cannot_be_written_is_explained(monkeypatch, tmp_path) -> None:
    """A cache path that is a file is a storage error with the way out."""
    (tmp_path / "prismscale").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        build.build_extension()


def test_compiler_errors_are_shown(monkeypatch, tmp_path) -> None:
    """A failing compiler's last lines are in the error."""
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(UsageError, match=r"(?s)exit code 3.*no such luck"):
        build.build_extension()


def test_cuda_operators_are_read_from_the_dispatch_tables() -> None:
    """Direct, shared and delegated CUDA kernels count; CPU-only ones do not."""
    text = """
- func: a.x(Tensor self) -> Tensor
  dispatch:
    CPU, CUDA: a_kernel
- func: b(Tensor self) -> Tensor
  structured_delegate: b.out
- func: b.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)
  structured: True
  dispatch:
    CUDA: b_cuda
- func: c(Tensor self) -> Tensor
  dispatch:
    CPU: c_cpu
    SparseCUDA: c_sparse
"""
    assert build.cuda_operators(text) == ["a.x", "b", "b.out"]


def test_activation_is_idempotent_and_for_one_gpu() -> None:
    """The same spec again is harmless; another is refused."""
    assert runtime.activate(device_spec("h100-sxm")) is runtime.active()
    with pytest.raises(UsageError, match="start another process"):
        runtime.activate(device_spec("b200"))


def test_an_unknown_gpu_is_named_with_the_known_ones() -> None:
    """A misspelt preset offers the right one."""
    with pytest.raises(UsageError, match="did you mean h100-sxm"):
        device_spec("h100-smx")


@pytest.mark.parametrize("change", [{"devices_per_node": 0}, {"total_memory_bytes": 5}])
def test_impossible_specs_are_refused(change) -> None:
    """A node needs devices, and a device more memory than others hold."""
    fields = {"name": "x", "total_memory_bytes": 80 << 30, "multi_processor_count": 1}
    with pytest.raises(UsageError):
        NullDeviceSpec(**(fields | {"capability": (9, 0)} | change))


@pytest.mark.parametrize("gpu", sorted(PRESETS))
def test_a_preset_is_the_gpu_of_the_cluster_of_its_name(gpu: str) -> None:
    """torch's total is a little less than nvidia-smi's, which the cluster has."""
    spec, device = PRESETS[gpu], Cluster.load(gpu).device

    assert spec.name == device.name
    assert 0.98 < spec.total_memory_bytes / device.memory_bytes <= 1
    assert spec.multi_processor_count == KernelProfile.load(gpu).multiprocessors


def test_every_gpu_of_a_cluster_can_be_pretended() -> None:
    """None is left out of the null device."""
    gpus = {name for name in Cluster.presets() if not Cluster.load(name).processor_communicates}

    assert gpus == set(PRESETS)
