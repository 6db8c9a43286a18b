"""Signals on CUDA streams, through the driver's stream memory operations."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from prismscale.errors import UsageError
from prismscale.live.pacer.shared_words import Point, SharedWords

_WAIT_UNTIL_GEQ = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``: wait until ``(int32_t)(word - value) >= 0``."""
_WORD_BYTES = 4


class CudaSignals:
    """Counters and gates in host memory that the GPU reads and writes."""

    def __init__(self, words: SharedWords) -> None:
        """Register the words with the driver.

        Raises:
            UsageError: the driver has no stream memory operations.
        """
        self._words = words
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._write = _function(driver, "cuStreamWriteValue32_v2")
            self._wait = _function(driver, "cuStreamWaitValue32_v2")
        except (OSError, AttributeError) as error:
            raise UsageError(
                f"--live on --device cuda needs an NVIDIA driver of CUDA 11.7 or newer ({error})"
            ) from error
        address = words.counters.__array_interface__["data"][0]
        n_bytes = words.counters.nbytes + words.gates.nbytes + words.answers.nbytes
        # torch does not check this call: the result is CUDA's error code.
        _check(int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0)), "cudaHostRegister")
        seen = ctypes.c_uint64()
        locate = driver.cuMemHostGetDevicePointer_v2
        _check(locate(ctypes.byref(seen), ctypes.c_void_p(address), 0), "cuMemHostGetDevicePointer")
        self._counters = seen.value
        self._gates = seen.value + words.counters.nbytes

    def count(self, stream: Any, point: Point) -> None:
        """Issue ``cuStreamWriteValue32``. The stream's earlier writes become visible first."""
        at = self._counters + _WORD_BYTES * point.word
        _check(self._write(stream.cuda_stream, at, point.value, 0), "cuStreamWriteValue32")

    def hold(self, stream: Any, gate: Point) -> None:
        """Issue ``cuStreamWaitValue32``."""
        at = self._gates + _WORD_BYTES * gate.word
        code = self._wait(stream.cuda_stream, at, gate.value, _WAIT_UNTIL_GEQ)
        _check(code, "cuStreamWaitValue32")


def _function(driver: ctypes.CDLL, name: str) -> Any:
    function = getattr(driver, name)
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def _check(code: int, call: str) -> None:
    if code != 0:
        raise UsageError(
            f"{call} failed with CUDA error {code}: live ranks on this GPU cannot be paced. "
            "Stream memory operations need Linux and a driver of CUDA 11.7 or newer"
        )
