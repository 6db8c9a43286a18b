"""Replacements, in this process, of everything in ``torch.cuda`` that would call libcuda.

A CPU-only torch contains the Python side of ``torch.cuda`` in full, but not the C functions that it
calls (``torch._C._cuda_*``). They are supplied here, so that the Python side runs unchanged. An
attribute of ``torch.cuda`` itself is replaced only if it was bound to a dummy at import. Each such
replacement is one row of a table, with its reason.
"""

from __future__ import annotations

import ctypes
import faulthandler
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from prismscale.devices.null import custom_kernels, null_streams
from prismscale.devices.null.gpus import NullDeviceSpec
from prismscale.devices.null.graphs import graph_api
from prismscale.devices.null.memory import memory_stats
from prismscale.devices.null.memory.device_settings import ProgramSettings
from prismscale.devices.null.memory.memory_history import MemoryHistory
from prismscale.devices.null.memory.program_history import ProgramHistory
from prismscale.emulation.process_group import EmulatedProcessGroup

# The version that GPU wheels of torch 2.13 are built with. Programs compare it with minimums.
CUDA_VERSION = "13.0"
_NCCL_VERSION = (2, 28, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProperties:
    """Properties of the GPU, as ``torch.cuda.get_device_properties`` returns them."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    uuid: str
    pci_bus_id: int
    shared_memory_per_block: int = 49_152
    regs_per_multiprocessor: int = 65_536
    max_threads_per_multi_processor: int = 2_048
    max_threads_per_block: int = 1_024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
    pci_device_id: int = 0
    pci_domain_id: int = 0


class Cudart:
    """The functions of the CUDA runtime that Python code calls through ``torch.cuda.cudart()``."""

    class cudaError:  # noqa: N801  (the name that programs look up)
        success = 0

    def __init__(self, library: ctypes.PyDLL, spec: NullDeviceSpec) -> None:
        self._library = library
        self._spec = spec

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return self._library.ps_free_bytes(device), self._spec.total_memory_bytes

    def cudaGetErrorString(self, error: int) -> str:
        return "no error" if error == 0 else f"error {error}"

    def _succeed(self, *_: Any) -> int:
        return 0

    cudaProfilerStart = cudaProfilerStop = _succeed
    cudaHostRegister = cudaHostUnregister = _succeed
    cudaStreamCreate = cudaStreamDestroy = _succeed


class _Nvtx:
    """Stub of NVTX: ranges and marks have no effect without a profiler."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


def install(library: ctypes.PyDLL, spec: NullDeviceSpec, history: MemoryHistory) -> None:
    """Complete ``torch.cuda`` for ``spec`` on top of the loaded extension.

    ``history`` is the history of the device's memory.
    """
    recorded = ProgramHistory(library, history, spec.devices_per_node)
    settings = ProgramSettings(library, spec)
    supplied = (
        _device_functions(library, spec, settings)
        | _stream_functions(library)
        | _memory_functions(library, spec, recorded)
        | _version_functions()
    )
    for name, function in supplied.items():
        setattr(torch._C, name, function)
    null_streams.bind(library)
    _replace_attributes(library, spec)
    graph_api.install(library)
    _keep_objects_on_the_host()
    custom_kernels.install()
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)
    library.ps_explain_faults()


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a C function whose effect has no counterpart on the null device."""


def _plain(function: Callable[..., int]) -> Callable[..., int]:
    """Wrap a ctypes function, which dynamo's tables cannot hash, in a Python function."""
    return lambda *arguments: function(*arguments)


def _device_functions(
    library: ctypes.PyDLL, spec: NullDeviceSpec, settings: ProgramSettings
) -> dict[str, Any]:
    def set_device(index: int) -> None:
        if not 0 <= index < spec.devices_per_node:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal {index}; the null node has "
                f"{spec.devices_per_node} devices"
            )
        torch.cuda._lazy_init()  # like torch's C function; DTensor asks is_initialized()
        library.ps_set_device(index)

    def exchange(index: int) -> int:
        previous = int(library.ps_current_device())
        if index >= 0:
            set_device(index)
        return previous

    ops: Any = torch.ops.prismscale_null  # an op may raise, a ctypes function must not
    return {
        "_cuda_getDeviceCount": lambda: spec.devices_per_node,
        "_cuda_init": settings.apply,
        "_cuda_getDevice": _plain(library.ps_current_device),
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": lambda index: exchange(index),  # dynamo distinguishes the two
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_synchronize": lambda: ops.synchronize(library.ps_current_device()),
        "_cuda_isInBadFork": lambda: False,  # no driver state that a fork would break
        "_cuda_ipc_collect": _nothing,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_set_sync_debug_mode": _nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCurrentBlasHandle": lambda: 0,
        "_accelerator_getAllocatorSettings": settings.text,
        "_accelerator_setAllocatorSettings": settings.change,
        "_cuda_cudaCachingAllocator_set_allocator_settings": settings.change,  # its older name
    }


def _stream_functions(library: ctypes.PyDLL) -> dict[str, Any]:
    cuda = null_streams.CUDA_DEVICE_TYPE

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        library.ps_set_device(device_index)
        library.ps_set_stream(device_index, stream_id)

    return {
        "_cuda_getCurrentStream": lambda i: (library.ps_current_stream(i), i, cuda),
        "_cuda_getDefaultStream": lambda i: (0, i, cuda),
        "_cuda_getCurrentRawStream": _plain(library.ps_current_stream),
        "_cuda_getStreamFromExternal": lambda pointer, i: (pointer, i, cuda),
        "_cuda_setStream": set_stream,
    }


def _memory_functions(
    library: ctypes.PyDLL, spec: NullDeviceSpec, recorded: ProgramHistory
) -> dict[str, Any]:
    fractions: dict[int, float] = {}

    def set_fraction(fraction: float, device: int) -> None:
        fractions[device] = fraction
        library.ps_set_memory_fraction(device, fraction)

    def empty_cache(*_: Any) -> None:
        for device in range(spec.devices_per_node):
            library.ps_empty_cache(device, 0, 0)

    def raw_alloc(size: int, stream: int) -> int:
        return int(library.ps_raw_alloc(library.ps_current_device(), size, stream))

    return {
        "_cuda_memoryStats": lambda device: memory_stats.read_stats(library, device),
        "_cuda_resetPeakMemoryStats": _plain(library.ps_reset_peaks),
        "_cuda_resetAccumulatedMemoryStats": _plain(library.ps_reset_accumulated),
        "_cuda_emptyCache": empty_cache,
        "_cuda_memorySnapshot": recorded.snapshot,
        "_cuda_record_memory_history": recorded.record,
        "_cuda_record_memory_history_legacy": recorded.record_legacy,
        "_cuda_attach_out_of_memory_observer": _nothing,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda device: fractions.get(device, 1.0),
        "_cuda_cudaCachingAllocator_raw_alloc": raw_alloc,
        "_cuda_cudaCachingAllocator_raw_delete": lambda block: library.ps_raw_free(
            library.ps_current_device(), block
        ),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_lock_mutex": _nothing,
        "_cuda_unlock_mutex": _nothing,
    }


def _version_functions() -> dict[str, Any]:
    major, minor, patch = _NCCL_VERSION
    return {
        "_cuda_getCompiledVersion": lambda: 13_000,
        "_cuda_getDriverVersion": lambda: 13_000,
        "_cuda_getArchFlags": lambda: "sm_80 sm_86 sm_90 sm_100 sm_120",
        "_nccl_version": lambda: major << 32 | minor << 16 | patch,
        "_nccl_version_suffix": lambda: b"",
        "_has_cuda": True,  # torch.backends.cuda.is_built()
    }


def _properties(spec: NullDeviceSpec, index: int) -> DeviceProperties:
    """Return the properties of one GPU of a node; programs tell GPUs apart by UUID and address."""
    return DeviceProperties(
        name=spec.name,
        major=spec.capability[0],
        minor=spec.capability[1],
        total_memory=spec.total_memory_bytes,
        multi_processor_count=spec.multi_processor_count,
        L2_cache_size=spec.l2_cache_bytes,
        shared_memory_per_block_optin=spec.shared_memory_per_block_optin_bytes,
        # One block can have all but a KiB.
        shared_memory_per_multiprocessor=spec.shared_memory_per_block_optin_bytes + 1024,
        clock_rate=spec.clock_khz,
        memory_clock_rate=spec.memory_clock_khz,
        memory_bus_width=spec.memory_bus_bits,
        uuid=f"00000000-0000-0000-0000-{index:012d}",
        pci_bus_id=index,
    )


def _replace_attributes(library: ctypes.PyDLL, spec: NullDeviceSpec) -> None:
    properties = [_properties(spec, index) for index in range(spec.devices_per_node)]
    ops: Any = torch.ops.prismscale_null
    generators = tuple(ops.default_generator(index) for index in range(spec.devices_per_node))
    by_name = "other modules import it from here by name"
    replacements: list[tuple[Any, str, Any, str]] = [
        (torch.cuda, "_cudart", Cudart(library, spec), "loaded from libcudart at import"),
        (torch.cuda, "_get_device_properties", properties.__getitem__, "set by _cuda_init"),
        (torch.cuda, "default_generators", generators, "filled by _cuda_init"),
        (torch.cuda, "_exchange_device", torch._C._cuda_exchangeDevice, "dummy bound at import"),
        (torch.cuda, "_maybe_exchange_device", torch._C._cuda_maybeExchangeDevice, "the same"),
        (torch.cuda, "_is_in_bad_fork", lambda: False, "bound at import"),
        (torch.cuda, "has_magma", False, "linear algebra has no kernels to choose from"),
        (torch.cuda, "Stream", null_streams.Stream, "its base class is a dummy"),
        (torch.cuda, "Event", null_streams.Event, "its base class is a dummy"),
        (torch.cuda, "ExternalStream", null_streams.ExternalStream, "its base class is a dummy"),
        (torch.cuda.streams, "Stream", null_streams.Stream, by_name),
        (torch.cuda.streams, "Event", null_streams.Event, by_name),
        (torch.cuda.streams, "ExternalStream", null_streams.ExternalStream, by_name),
        (torch.cuda.nvtx, "_nvtx", _Nvtx(), "its stub raises"),
        (torch.version, "cuda", CUDA_VERSION, "None says that this is no CUDA build"),
        (torch.UntypedStorage, "resize_", _resize_with(library), "raises 'built without USE_CUDA'"),
        (torch.UntypedStorage, "__new__", _make_storage, "does not recognise cuda as a device"),
    ]
    for owner, name, value, _reason in replacements:
        setattr(owner, name, value)


def _keep_objects_on_the_host() -> None:
    """Make object collectives use CPU tensors, also on NCCL groups.

    They pickle objects into tensors, and CUDA tensors have no bytes here.
    """
    EmulatedProcessGroup.objects_on_host = True
    setattr(distributed_c10d, "_get_object_coll_device", lambda group=None: "cpu")  # noqa: B010
    for name in ("broadcast_object_list", "send_object_list", "recv_object_list"):
        on_host = _without_device(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, on_host)
        setattr(dist, name, on_host)


def _without_device(collective: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(collective)

    @wraps(collective)
    def on_host(*arguments: Any, **named: Any) -> Any:
        bound = parameters.bind(*arguments, **named)
        bound.arguments.pop("device", None)
        return collective(*bound.args, **bound.kwargs)

    return on_host


def _make_storage(cls: Any, *arguments: Any, device: Any = None, **named: Any) -> Any:
    """Create a storage, as ``deepcopy``, ``torch.save`` and ``torch.load`` do."""
    if device is None or torch.device(device).type != "cuda":
        base: Any = torch._C.StorageBase
        return base.__new__(cls, *arguments, device=device, **named)
    n_bytes = arguments[0] if arguments and isinstance(arguments[0], int) else 0
    return torch.empty(n_bytes, dtype=torch.uint8, device=device).untyped_storage()


def _resize_with(library: ctypes.PyDLL) -> Callable[[Any, int], Any]:
    cpu_resize: Any = getattr(torch._C.StorageBase, "resize_")  # noqa: B009  (not in its stubs)

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return cpu_resize(self, size)
        library.ps_resize_storage(self._cdata, size)
        return self

    return resize_
