"""Triton kernels as programs write them: none of them ever runs."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

SCALE = tl.constexpr(2)


@triton.jit
def scaled(block, by: tl.constexpr):
    """A function of a kernel."""
    return block * by


@triton.jit
def matmul(
    a, b, c, M, N, K, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """``c = 2 a b``, tile by tile."""
    pid = tl.program_id(axis=0).to(tl.int64)
    width = tl.cdiv(N, BN)
    rows, columns = pid // width, pid % width
    m = (rows * BM + tl.arange(0, BM)) % M
    n = (columns * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    a_at = a + m[:, None] * K + k[None, :]
    b_at = b + k[:, None] * N + n[None, :]
    found = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        left = tl.load(a_at, mask=k[None, :] < K - step * BK, other=0.0)
        right = tl.load(b_at, mask=k[:, None] < K - step * BK, other=0.0)
        found += tl.dot(left, right, input_precision=PRECISION)
        a_at += BK
        b_at += BK * N
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(
        c + m[:, None] * N + n[None, :], scaled(found, SCALE).to(c.dtype.element_ty), mask=mask
    )


@triton.jit
def causal(q, k, out, length, D: tl.constexpr, B: tl.constexpr):
    """Products of rows with all rows before them."""
    row = tl.program_id(0)
    here, d = tl.arange(0, B), tl.arange(0, D)
    queries = tl.load(q + (row * B + here)[:, None] * D + d[None, :])
    found = tl.zeros([B, B], dtype=tl.float32)
    for column in range(0, row + 1):
        keys = tl.load(k + (column * B + here)[:, None] * D + d[None, :])
        found += tl.dot(queries, keys.T)
    tl.store(out + (row * B + here)[:, None] * B + here[None, :], found)


@triton.jit
def nested(q, k, out, turns, B: tl.constexpr):
    """Products in a loop in a loop."""
    at = tl.arange(0, B)
    found = tl.zeros([B, B], dtype=tl.float32)
    for row in range(turns):
        left = tl.load(q + row + at[:, None] * B + at[None, :])
        for column in tl.range(0, 2 * turns, num_stages=2):
            found = tl.dot(left, tl.load(k + column + at[:, None] * B + at[None, :]), found)
    tl.store(out + at, tl.sum(found, 1))


@triton.jit
def double(x, count, B: tl.constexpr):
    """In place."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def gathered(table, rows, out, count_ptr, WIDTH: tl.constexpr):
    """One row of a table for each program that there are rows for."""
    row = tl.program_id(0)
    if row >= tl.load(count_ptr):
        return
    at = tl.arange(0, WIDTH)
    index = tl.load(rows + row)
    if index != -1:
        tl.store(out + row * WIDTH + at, tl.load(table + index * WIDTH + at))


@triton.jit
def row_sums(x, out, WIDTH: tl.constexpr):
    """A reduction."""
    row = tl.program_id(0)
    values = tl.load(x + row * WIDTH + tl.arange(0, WIDTH)).to(tl.float32)
    tl.store(out + row, tl.sum(tl.exp(values - tl.max(values, axis=0)), axis=0))


@triton.jit
def as_often(x, times, out, B: tl.constexpr):
    """A loop whose length a tensor holds."""
    at = tl.arange(0, B)
    for turn in range(tl.load(times + tl.program_id(0))):
        tl.store(out + turn * B + at, tl.load(x + turn * B + at))


@triton.jit
def unending(x):
    """A loop that ends when a value is there."""
    while tl.load(x) != 1:
        pass


@triton.jit
def described(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """One tile by descriptors, which the kernel makes."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [K, N])
    tl.make_tensor_descriptor(c, [M, N], [N, 1], [M, N]).store(
        [0, 0], tl.dot(left.load([0, 0]), right.load([0, 0])).to(tl.bfloat16)
    )


@triton.jit
def grouped(a_addresses, b_addresses, c_addresses, sizes, GROUPS: tl.constexpr, B: tl.constexpr):
    """Products whose factors' addresses and sizes lie in tensors, shared out between programs."""
    tile, last = tl.program_id(0), 0
    at = tl.arange(0, B)
    for group in range(GROUPS):
        m, n, k = [tl.load(sizes + 3 * group + place) for place in (0, 1, 2)]
        tiles = tl.cdiv(m, B) * tl.cdiv(n, B)
        while tile >= last and tile < last + tiles:
            a = tl.load(a_addresses + group).to(tl.pointer_type(tl.bfloat16))
            b = tl.load(b_addresses + group).to(tl.pointer_type(tl.bfloat16))
            found = tl.zeros((B, B), dtype=tl.float32)
            for step in range(0, tl.cdiv(k, B)):
                left = tl.load(a + at[:, None] * k + (step * B + at)[None, :])
                found += tl.dot(left, tl.load(b + (step * B + at)[:, None] * n + at[None, :]))
            c = tl.load(c_addresses + group).to(tl.pointer_type(tl.bfloat16))
            tl.store(c + at[:, None] * n + at[None, :], found.to(tl.bfloat16))
            tile += tl.num_programs(0)
        last = last + tiles
