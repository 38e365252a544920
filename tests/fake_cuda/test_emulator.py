"""Device code on the emulator, against numpy."""

import ctypes

import numpy as np
import pytest

from .conftest import Params


@pytest.fixture(params=[0, 1], ids=["ascending", "descending"])
def ordered(cuda, request):
    cuda.descending(request.param)
    return cuda


@pytest.mark.parametrize("grid, block", [((3, 2, 4), (5, 3, 2)), ((300,), (33,)), ((1,), (1024,)), ((7, 5), (4, 4, 8))])
def test_every_thread_of_a_grid_runs_once(ordered, grid, block):
    grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
    count = int(np.prod(grid) * np.prod(block))
    out = ordered.alloc(count * 8)
    ordered.launch("identify_kernel", grid, block, Params(out=out))
    got = ordered.download(out, np.empty(count, np.uint64))
    bz, by, bx, tz, ty, tx = np.indices((*grid[::-1], *block[::-1])).reshape(6, -1).astype(np.uint64)
    assert (got == bz << 40 | by << 32 | bx << 16 | tz << 12 | ty << 8 | tx).all()


@pytest.mark.parametrize("block", [1, 31, 32, 100, 256])
def test_barriers(ordered, block):
    data = np.arange(40 * block, dtype=np.uint32)
    pointer, out = ordered.upload(data), ordered.alloc(data.nbytes)
    ordered.launch("reverse_kernel", 40, block, Params(pointer, out, 6), shared=4 * block)
    expected = data.reshape(40, block)
    for _ in range(6):
        expected = np.roll(expected[:, ::-1] + 1, -1, axis=1)
    assert (ordered.download(out, np.empty_like(data)).reshape(40, block) == expected).all()


@pytest.mark.parametrize("by", [0, 1, 3])
@pytest.mark.parametrize("block", [32, 128])
def test_clusters(ordered, block, by):
    data = np.arange(12 * block, dtype=np.float32)
    pointer, out = ordered.upload(data), ordered.alloc(data.nbytes)
    ordered.launch("pass_on_kernel", 12, block, Params(pointer, out, by), shared=4 * block + 16)
    expected = np.roll(data.reshape(3, 4, block), by, axis=1)[:, :, ::-1] + 1
    assert (ordered.download(out, np.empty_like(data)).reshape(3, 4, block) == expected).all()


@pytest.mark.parametrize("mode, text", [(1, "may not have begun"), (2, "more was sent")])
def test_wrong_use_of_a_cluster_is_reported(ordered, mode, text):
    data = np.zeros(256, np.float32)
    pointer, out = ordered.upload(data), ordered.alloc(data.nbytes)
    assert ordered.try_launch("pass_on_kernel", 6, 32, Params(pointer, out, 1), shared=144) == 1
    assert "in clusters of 4" in ordered.errors()[0]
    ordered.launch("pass_on_kernel", 8, 32, Params(pointer, out, 1, mode), shared=144)
    assert ordered.call("cuCtxSynchronize") == 719
    assert text in ordered.errors()[-1]


def warp_cases():
    lanes = np.arange(32)
    yield 0, 5, lambda v, n: v[lanes * n % 32]
    for step in (1, 16, 31):
        yield 1, step, lambda v, n: v[lanes ^ n]
        yield 2, step, lambda v, n: v[np.where(lanes + n < 32, lanes + n, lanes)]
        yield 3, step, lambda v, n: v[np.where(lanes >= n, lanes - n, lanes)]
        yield 8, step, lambda v, n: v[lanes ^ n]
        yield 9, step, lambda v, n: v[lanes ^ n]
    yield 4, 3, lambda v, n: v[np.where(lanes % 8 + n < 8, lanes + n, lanes)]
    yield 5, 3, lambda v, n: np.full(32, np.uint32(sum(1 << i for i in range(32) if v[i] % n == 0)).view(np.int32))
    yield 6, 12, lambda v, n: np.full(32, int((v == n).any()))
    yield 6, 5000, lambda v, n: np.full(32, 0)
    yield 7, 1000, lambda v, n: np.full(32, 1)
    yield 7, 70, lambda v, n: np.full(32, int((v < n).all()))


@pytest.mark.parametrize("mode, n, expected", list(warp_cases()))
def test_warp_operations(ordered, mode, n, expected):
    values = np.random.default_rng(mode).permutation(96)[:32].astype(np.int32)
    values[7] = 12
    pointer, out = ordered.upload(values), ordered.alloc(128)
    ordered.launch("warp_kernel", 1, 32, Params(pointer, out, n, mode))
    assert (ordered.download(out, np.empty(32, np.int32)) == expected(values, n)).all()


@pytest.mark.parametrize("block", [32, 64, 96, 1024])
def test_reductions(ordered, block):
    x = np.random.default_rng(0).standard_normal((5, block)).astype(np.float32) - 3
    pointer, out = ordered.upload(x), ordered.alloc(x.nbytes * 4)
    ordered.launch("reduce_kernel", 5, block, Params(pointer, out))
    got = ordered.download(out, np.empty((5, block, 4), np.float32))
    wide = x.astype(np.float64)
    expected = np.stack([wide.sum(1), wide.max(1), wide.sum(1), (wide * wide).sum(1)], -1)
    np.testing.assert_allclose(got, np.repeat(expected[:, None], block, 1), rtol=1e-5)
    assert (got == got[:, :1]).all(), "all threads get the same"


def bf16_bits(x):
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma_through_shared_memory(ordered, kind):
    rng = np.random.default_rng(1)
    # Eighths of small integers are exact in both types.
    a, b = rng.integers(-9, 9, (16, 16)) / 8, rng.integers(-9, 9, (16, 8)) / 8
    flat = np.concatenate([a.ravel(), b.ravel()])
    data = flat.astype(np.float16) if kind == "f16" else bf16_bits(flat)
    pointer, out = ordered.upload(data), ordered.alloc(16 * 8 * 4)
    ordered.launch(f"product_{kind}", 1, 32, Params(pointer, out))
    assert (ordered.download(out, np.empty((16, 8), np.float32)) == 2 * (a @ b)).all()


def test_mma_of_tf32(ordered):
    rng = np.random.default_rng(1)
    a, b = rng.integers(-9, 9, (16, 8)) / 8, rng.integers(-9, 9, (8, 8)) / 8
    # Bits that tf32 does not have change nothing.
    data = np.concatenate([a.ravel(), b.ravel()]).astype(np.float32).view(np.uint32) | 0x1FFF
    pointer, out = ordered.upload(data), ordered.alloc(16 * 8 * 4)
    ordered.launch("product_tf32", 1, 32, Params(pointer, out))
    assert (ordered.download(out, np.empty((16, 8), np.float32)) == a @ b).all()


def test_asynchronous_copies(ordered):
    data = np.arange(128 * 4, dtype=np.uint32)
    pointer, out = ordered.upload(data), ordered.alloc(data.nbytes)
    for mode in (0, 1):
        ordered.launch("zero_fill_kernel", 1, 128, Params(pointer, out, 50, mode), shared=data.nbytes)
        got = ordered.download(out, np.empty_like(data))
        if mode == 0:
            assert (got[:200] == data[:200]).all() and (got[200:] == 0).all()
        else:
            assert (got == 7).all(), "what is not waited for has not come"


def test_bits(ordered):
    data = np.random.default_rng(2).integers(0, 2**32, (64, 3), dtype=np.uint32)
    pointer, out = ordered.upload(data), ordered.alloc(64 * 16)
    ordered.launch("bits_kernel", 2, 32, Params(pointer, out))
    ordered.launch("bits_kernel", 1, 64, Params(pointer, out))
    got = ordered.download(out, np.empty((64, 4), np.uint32))
    for (a, b, c), row in zip(data.tolist(), got.tolist()):
        pairs = (b << 32 | a).to_bytes(8, "little")
        expected = [a & b | c, int.from_bytes(bytes(pairs[i] for i in (0, 4, 2, 6)), "little")]
        expected += [a.bit_count() << 8 | 32 - b.bit_length(), (b << 32 | a) >> c % 32 & 0xFFFFFFFF]
        assert row == expected


def test_atomics_across_blocks(ordered):
    out = ordered.upload(np.zeros(3, np.int32))
    ordered.launch("count_kernel", 300, 64, Params(out=out))
    got = ordered.download(out, np.empty(3, np.int32))
    assert got[0] == 300 * 64 and got[1] == 299 and got.view(np.float32)[2] == 300 * 32


WRONG = {
    0: ("__syncthreads", 719),
    1: ("operation of their warp", 719),
    2: ("different operations of the warp", 719),
    5: ("access to", 700),
    7: ("misaligned", 719),
    8: ("no device memory", 700),
}


@pytest.mark.parametrize("mode", WRONG)
def test_a_wrong_kernel_is_reported(ordered, mode):
    out = ordered.alloc(1000)
    ordered.launch("wrong_kernel", 3, 64, Params(out=out, n=1000, mode=mode), shared=64)
    text, code = WRONG[mode]
    assert ordered.call("cuCtxSynchronize") == code
    (error,) = ordered.errors()
    assert error.startswith("wrong_kernel: block (") and text in error
    # It sticks to the context.
    assert ordered.call("cuMemFree_v2", out) == code


@pytest.mark.parametrize("mode, byte", [(3, 1000), (4, -1)])
def test_a_write_beside_an_allocation_is_reported(ordered, mode, byte):
    out = ordered.alloc(1000)
    ordered.launch("wrong_kernel", 1, 32, Params(out=out, n=1000, mode=mode), shared=64)
    assert ordered.check_guards() == 0
    ordered.check("cuMemFree_v2", out)
    assert len(ordered.errors()) == 2 and all(f"at its byte {byte}" in e for e in ordered.errors())


def test_a_write_beside_shared_memory_is_reported(ordered):
    out = ordered.alloc(16)
    ordered.launch("wrong_kernel", 1, 32, Params(out=out, n=16, mode=6), shared=64)
    assert ordered.call("cuCtxSynchronize") == 719
    assert "outside of the dynamic shared memory, at byte 64 of 64" in ordered.errors()[0]
    ordered.reset()
    ordered.launch("wrong_kernel", 1, 32, Params(out=out, n=15, mode=6), shared=64)
    ordered.check("cuCtxSynchronize")


def test_stale_and_host_pointers_are_reported(ordered):
    data = np.zeros(64, np.float32)
    out = ordered.alloc(256)
    host = ctypes.create_string_buffer(1 << 20)
    ordered.launch("affine_kernel", 1, 64, Params(ctypes.addressof(host), out, 64))
    assert ordered.call("cuCtxSynchronize") == 700
    assert "points to host memory" in ordered.errors()[0]
    ordered.reset()
    stale = ordered.upload(data)
    ordered.check("cuMemFree_v2", stale)
    ordered.launch("affine_kernel", 1, 64, Params(stale, out, 64))
    assert ordered.call("cuCtxSynchronize") == 700
    assert "not allocated" in ordered.errors()[0]
