"""Transformer Engine 2: its PyTorch extension, under its own Python code.

The wheel ``transformer-engine`` is Python. What comes with CUDA is ``transformer_engine_torch``,
whose functions are here, and a core library, which is not loaded.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from prismscale.devices.null.libraries import multi_tensor
from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_EXTENSION = "transformer_engine_torch"
_CUDNN_VERSION = 91501
_CUBLASLT_VERSION = 130100
"""Of CUDA 13, which the null device says that it is."""
_CUBLAS_STREAMS = 4
_FIRST, _AFTER_LAST = (2, 9), (2, 12)
_REFUSED = """
    CommOverlap CommOverlapBase CommOverlapCore CommOverlapHelper CommOverlapP2P CommOverlapP2PBase
    bulk_overlap_ag_with_external_gemm copy_to_kv_cache create_nvshmem_tensor init_nvshmem_backend
    multi_tensor_compute_scale_and_scale_inv multi_tensor_compute_scale_inv_e8m0 nvshmem_finalize
    nvshmem_send_on_current_stream nvshmem_wait_on_current_stream thd_get_partitioned_indices
    thd_grad_correction thd_out_correction thd_read_half_tensor thd_read_second_half_lse
    thd_second_half_lse_correction
"""
"""What the extension has and this package does not: user buffers, NVSHMEM, inference, and context
parallelism of packed sequences."""


def stand_in() -> StandIn:
    """The stand-in for version 2."""
    return StandIn(
        name="Transformer Engine",
        namespace="transformer_engine",
        modules={_EXTENSION: make_extension},
        python="transformer_engine",
        distribution="transformer-engine",
        around={"transformer_engine.common": _without_core_library},
    )


def check_version(version: str) -> None:
    """Functions take other arguments in other versions.

    Raises:
        NotImplementedError: the stand-in was not written for ``version``. Not an ImportError, which
            programs take as leave to go on with other layers.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if not _FIRST <= (major, minor) < _AFTER_LAST:
        raise NotImplementedError(
            "prismscale's stand-in for Transformer Engine knows versions 2.9 to 2.11; installed is "
            f"{version}: pip install --no-deps transformer-engine==2.9.0, or give a stand-in of "
            f"your own: --stand-in {_EXTENSION}=FILE.py"
        )


def make_extension() -> ModuleType:
    """The module ``transformer_engine_torch``.

    Raises:
        NotImplementedError: of :func:`check_version`, for the Python code that is installed.
    """
    installed = stand_in().version
    if installed:
        check_version(installed)
    from prismscale.devices.null.libraries.transformer_engine import (
        activations,
        attention,
        attention_backends,
        casts,
        embeddings,
        enums,
        experts,
        norms,
        products,
    )

    content: dict[str, Any] = {enum.__name__: enum for enum in enums.ENUMS}
    content |= {name: _refused(name) for name in _REFUSED.split()}
    parts = (activations, attention, attention_backends, casts, embeddings, norms, products)
    for part in (*parts, experts):
        content |= part.FUNCTIONS
    content |= multi_tensor.functions("transformer_engine")
    content |= {
        "FP8TensorMeta": SimpleNamespace,
        "get_cudnn_version": lambda: _CUDNN_VERSION,
        "get_cublasLt_version": lambda: _CUBLASLT_VERSION,
        "get_num_cublas_streams": lambda: _CUBLAS_STREAMS,
        "get_stream_priority_range": lambda device=-1: (0, -5),
        "device_supports_multicast": lambda device=-1: True,
        "ubuf_built_with_mpi": lambda: False,
    }
    return module_of(_EXTENSION, content, library="Transformer Engine")


def _refused(name: str) -> type:
    """A class, because the library's Python code names some of them in annotations."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"prismscale's stand-in for Transformer Engine has no {_EXTENSION}.{name}; run without "
            f"what needs it, or give a stand-in of your own: --stand-in {_EXTENSION}=FILE.py"
        )

    return type(name, (), {"__new__": refuse})


@contextmanager
def _without_core_library(common: Any) -> Iterator[None]:
    """Import ``transformer_engine.common`` as the library's own build does, which has no binary
    yet; its framework extensions are then modules like others."""
    variable = "NVTE_PROJECT_BUILDING"
    given = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[variable]
        else:
            os.environ[variable] = given
    common.load_framework_extension = _import_extension


def _import_extension(framework: str) -> None:
    importlib.import_module(f"transformer_engine_{framework}")
