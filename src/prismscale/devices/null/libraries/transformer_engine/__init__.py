"""Stand-in for the PyTorch extension of Transformer Engine 2, under its own Python code.

The wheel ``transformer-engine`` is Python. The CUDA parts are ``transformer_engine_torch``, whose
functions are defined here, and a core library, which is not loaded.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from prismscale.devices.null.libraries import multi_tensor
from prismscale.devices.null.libraries.stand_in import StandIn, module_of
from prismscale.devices.null.libraries.transformer_engine.loading import (
    with_file_of_extension,
    without_core_library,
)
from prismscale.devices.null.libraries.transformer_engine.versions import (
    DISTRIBUTION,
    EXTENSION,
    check_version,
    installed,
)
from prismscale.torch_versions import installed_cudnn

_CUBLASLT_VERSION = 130100
"""Version of cuBLASLt in CUDA 13, which is the CUDA version that the null device reports."""
_CUBLAS_STREAMS = 4
_REFUSED = """
    columnwise_swizzle copy_to_kv_cache create_nvshmem_tensor
    cusolvermp_ctx_create cusolvermp_ctx_destroy ep_combine ep_combine_bwd ep_dispatch
    ep_dispatch_bwd ep_finalize ep_get_zero_copy ep_handle_mem_size ep_initialize ep_prepare
    ep_prepare_and_dispatch ep_zero_copy_supported fused_rope_thd_backward fused_rope_thd_forward
    fused_topk_with_score_function_qb_fwd
    group_requantize_inplace init_nvshmem_backend newton_schulz nvfp4_quantize_with_amax
    nvshmem_finalize nvshmem_send_on_current_stream nvshmem_wait_on_current_stream rowwise_swizzle
    thd_copy_valid_tokens_from_per_split_to_rank_local thd_cp_rank_order_to_sequence_order
    thd_sequence_order_to_cp_rank_order
"""
"""Functions of the extension that this package lacks: NVSHMEM, inference, packed sequences that
change ranks by all-to-all, and features that an environment variable selects (expert parallelism
within the library, cuSOLVERMp)."""


def stand_in() -> StandIn:
    """Return the stand-in for version 2."""
    return StandIn(
        name="Transformer Engine",
        namespace="transformer_engine",
        modules={EXTENSION: make_extension},
        python="transformer_engine",
        distribution=DISTRIBUTION,
        around={
            "transformer_engine.common": without_core_library,
            "transformer_engine.pytorch": with_file_of_extension,
        },
    )


def make_extension() -> ModuleType:
    """Return the module ``transformer_engine_torch``.

    Raises:
        NotImplementedError: this stand-in was not written for the installed Python code.
    """
    if installed():
        check_version(installed())
    from prismscale.devices.null.libraries.transformer_engine import (
        activations,
        attention,
        attention_backends,
        casts,
        embeddings,
        enums,
        experts,
        fp4_weights,
        grouped_mlp,
        grouped_tensors,
        norms,
        packed_ranks,
        products,
        router,
        user_buffers,
    )

    content: dict[str, Any] = {enum.__name__: enum for enum in enums.ENUMS}
    content |= {name: _refused(name) for name in _REFUSED.split()}
    parts = (activations, attention, attention_backends, casts, embeddings, norms, products)
    of_experts = (experts, grouped_mlp, grouped_tensors, router)
    for part in (*parts, *of_experts, fp4_weights, packed_ranks, user_buffers):
        content |= part.FUNCTIONS
    content |= multi_tensor.functions("transformer_engine")
    content |= {
        "FP8TensorMeta": SimpleNamespace,
        "get_cudnn_version": installed_cudnn,
        "get_cublasLt_version": lambda: _CUBLASLT_VERSION,
        "get_num_cublas_streams": lambda: _CUBLAS_STREAMS,
        "_num_cublas_streams": _CUBLAS_STREAMS,
        "get_stream_priority_range": lambda device=-1: (0, -5),
        "device_supports_multicast": lambda device=-1: True,
        "ubuf_built_with_mpi": lambda: False,
    }
    return module_of(EXTENSION, content, library="Transformer Engine")


def _refused(name: str) -> type:
    """Return a class that raises NotImplementedError when it is called.

    It is a class because the library's Python code uses some of these names in annotations.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"prismscale's stand-in for Transformer Engine has no {EXTENSION}.{name}; run without "
            f"what needs it, or give a stand-in of your own: --stand-in {EXTENSION}=FILE.py"
        )

    return type(name, (), {"__new__": refuse})
