"""GPUs that the null device can imitate.

Names and memory totals are those that ``torch.cuda.get_device_properties`` reports on such a GPU.
The total differs between drivers and boards by some MiB, so a preset holds one observed value.
Multiprocessor counts and capabilities are NVIDIA's (product data sheets, CUDA programming guide).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from prismscale.cluster import Device
from prismscale.cost.nccl.nccl_memory import SharpSettings
from prismscale.cost.nccl.occupancy import RING_CHANNELS, ring_channels
from prismscale.cost.target_gpu import gpu_key
from prismscale.errors import UsageError, did_you_mean
from prismscale.torch_versions import NEWEST, release_of

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class NullDeviceSpec:
    """A GPU as ``torch.cuda`` shows it, and the number of GPUs in a node.

    ``context_bytes`` is the size of the CUDA context: users of torch saw 400 to 616 MiB (pytorch
    issues 107667 and 109888, LMCache issue 4019). ``nccl_channels`` is the number of channels of
    NCCL's collectives among the GPUs of a node (:mod:`prismscale.cost.nccl.occupancy`).

    ``launch_queue_depth`` is the number of unfinished kernel launches that one stream can hold; the
    next launch blocks the host (``csrc/spans.h``). CUDA documents no figure. Programs that launch
    small kernels in a loop see about 1,000, and as many for each further stream
    (stackoverflow.com/questions/53970187, and topic 68937 of NVIDIA's developer forum). That newer
    GPUs and drivers have the same depth is an assumption.

    ``clock_khz`` and ``memory_clock_khz`` are the highest clocks that nvidia-smi shows.
    ``nvlinks`` is the number of NVLinks that join two GPUs of a node (NVIDIA's architecture
    whitepapers).
    """

    name: str
    total_memory_bytes: int
    multi_processor_count: int
    capability: tuple[int, int]
    shared_memory_per_block_optin_bytes: int = 232_448
    l2_cache_bytes: int = 50 * _MIB
    devices_per_node: int = 8
    context_bytes: int = 512 * _MIB
    nccl_channels: int = RING_CHANNELS
    launch_queue_depth: int = 1024
    nvlinks: int = 18
    clock_khz: int = 1_980_000
    memory_clock_khz: int = 2_619_000
    memory_bus_bits: int = 5_120

    def __post_init__(self) -> None:
        if not 1 <= self.devices_per_node <= 16:
            raise UsageError(
                f"devices_per_node is {self.devices_per_node}; a null node holds 1 to 16 devices"
            )
        if self.total_memory_bytes <= self.context_bytes or self.context_bytes < 0:
            raise UsageError(
                f"total_memory_bytes ({self.total_memory_bytes}) must be greater than "
                f"context_bytes ({self.context_bytes}), and neither may be negative"
            )
        if self.launch_queue_depth < 1:
            raise UsageError(f"launch_queue_depth is {self.launch_queue_depth}; at least 1")
        if self.multi_processor_count < 1:
            raise UsageError(f"multi_processor_count is {self.multi_processor_count}; at least 1")

    @property
    def nvlink_sharp(self) -> SharpSettings | None:
        """NCCL's channels for NVLink SHARP; None for a GPU older than Hopper: it cannot multicast.

        The numbers are ``NVLS_NCHANNELS_SM90`` and others in ``nvls.cc``.
        """
        if self.capability < (9, 0):
            return None
        if self.capability[0] == 9:
            return SharpSettings(channels=16, channels_across=16)
        return SharpSettings(channels=24, channels_across=32)

    def blas_workspace_bytes(self, torch_version: str) -> int:
        """Return the default cuBLAS workspace of one handle on one stream.

        It applies unless CUBLAS_WORKSPACE_CONFIG is set. torch takes 32 MiB on Hopper, from 2.12 on
        also on newer GPUs (pull request 175344), and 8,320 KiB on others
        (``aten/src/ATen/cuda/CublasHandlePool.cpp``).
        """
        release = release_of(torch_version) or NEWEST
        is_large = self.capability[0] == 9 or (self.capability[0] > 9 and release >= (2, 12))
        return 32 * _MIB if is_large else (4096 * 2 + 16 * 8) * 1024


PRESETS: dict[str, NullDeviceSpec] = {
    "a100-80g": NullDeviceSpec(
        name="NVIDIA A100-SXM4-80GB",
        total_memory_bytes=int(79.15 * _GIB),
        multi_processor_count=108,
        capability=(8, 0),
        shared_memory_per_block_optin_bytes=166_912,
        nccl_channels=ring_channels("a100-80g"),
        l2_cache_bytes=40 * _MIB,
        nvlinks=12,
        clock_khz=1_410_000,
        memory_clock_khz=1_593_000,
    ),
    "h100-sxm": NullDeviceSpec(
        name="NVIDIA H100 80GB HBM3",
        total_memory_bytes=int(79.10 * _GIB),
        multi_processor_count=132,
        capability=(9, 0),
    ),
    "h100-96g": NullDeviceSpec(
        name="NVIDIA H100",
        total_memory_bytes=int(95.04 * _GIB),
        multi_processor_count=132,
        capability=(9, 0),
    ),
    "h200-sxm": NullDeviceSpec(
        name="NVIDIA H200",
        total_memory_bytes=int(139.81 * _GIB),
        multi_processor_count=132,
        capability=(9, 0),
        memory_clock_khz=3_201_000,
        memory_bus_bits=6_144,
    ),
    "gb300": NullDeviceSpec(
        name="NVIDIA GB300",
        total_memory_bytes=int(276.50 * _GIB),
        multi_processor_count=152,
        capability=(10, 3),
        l2_cache_bytes=126 * _MIB,
        clock_khz=1_965_000,
        memory_clock_khz=3_996_000,
        memory_bus_bits=8_192,
    ),
    "b300": NullDeviceSpec(
        name="NVIDIA B300 SXM6 AC",
        total_memory_bytes=int(267.69 * _GIB),
        multi_processor_count=148,
        capability=(10, 3),
        l2_cache_bytes=126 * _MIB,
        clock_khz=1_965_000,
        memory_clock_khz=3_996_000,
        memory_bus_bits=8_192,
    ),
    "gb200": NullDeviceSpec(
        name="NVIDIA GB200",
        total_memory_bytes=int(184.31 * _GIB),
        multi_processor_count=152,
        capability=(10, 0),
        l2_cache_bytes=126 * _MIB,
        clock_khz=1_965_000,
        memory_clock_khz=3_996_000,
        memory_bus_bits=8_192,
    ),
    "b200": NullDeviceSpec(
        name="NVIDIA B200",
        total_memory_bytes=int(178.35 * _GIB),
        multi_processor_count=148,
        capability=(10, 0),
        l2_cache_bytes=126 * _MIB,
        clock_khz=1_965_000,
        memory_clock_khz=3_996_000,
        memory_bus_bits=8_192,
    ),
}


def device_spec(name: str, *, devices_per_node: int | None = None) -> NullDeviceSpec:
    """Return the preset called ``name``; raises UsageError if there is none."""
    if name not in PRESETS:
        raise UsageError(f"no null GPU is called {name!r}; {did_you_mean(name, PRESETS)}")
    spec = PRESETS[name]
    return spec if devices_per_node is None else replace(spec, devices_per_node=devices_per_node)


def target_gpu(device: Device, *, devices_per_node: int) -> NullDeviceSpec:
    """Return the spec of the null device for a cluster's ``device``.

    It is the preset of the same name, or else of the GPU from which ``device`` is scaled. What the
    cluster says of ``device`` (memory, multiprocessors, cache) replaces the preset's values.

    Raises:
        UsageError: the GPU is not known.
    """
    scaled_from = PRESETS[gpu_key(device)]
    known = next((spec for spec in PRESETS.values() if spec.name == device.name), scaled_from)
    return replace(
        known,
        name=device.name,
        total_memory_bytes=device.memory_bytes,
        devices_per_node=devices_per_node,
        multi_processor_count=device.multiprocessors or known.multi_processor_count,
        l2_cache_bytes=round(device.cache_bytes or known.l2_cache_bytes),
    )
