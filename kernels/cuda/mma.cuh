// Warp-wide matrix products, their operand loads and asynchronous copies to shared memory (sm_80 instructions).
#pragma once

#include "common.cuh"

namespace nxrt {

// d += a b for a 16x16 (row major), b 16x8 (column major), d 16x8, held by one warp as PTX says for mma.m16n8k16:
//   with g = lane / 4 and t = lane % 4 * 2,
//   a[0] = A[g][t..t+2]   a[1] = A[g+8][t..t+2]   a[2] = A[g][t+8..t+10]   a[3] = A[g+8][t+8..t+10]
//   b[0] = B[t..t+2][g]   b[1] = B[t+8..t+10][g]
//   d[0], d[1] = D[g][t], D[g][t+1]   d[2], d[3] = D[g+8][t], D[g+8][t+1]
// T is half or bf16, the type of the pairs in a and b.
template <class T>
NXRT_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// d += a b for a 16x8, b 8x8, d 16x8 as above, of f32 whose lowest 13 bits are ignored; with t = lane % 4,
//   a[0] = A[g][t]   a[1] = A[g+8][t]   a[2] = A[g][t+4]   a[3] = A[g+8][t+4]
//   b[0] = B[t][g]   b[1] = B[t+4][g]
NXRT_DEVICE void mma_m16n8k8(float (&d)[4], const float (&a)[4], const float (&b)[2]);

#ifdef NXRT_EMULATE

template <>
NXRT_DEVICE void mma_m16n8k16<half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    emulate::mma_m16n8k16_f16(d, a, b);
}
template <>
NXRT_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    emulate::mma_m16n8k16_bf16(d, a, b);
}

NXRT_DEVICE void mma_m16n8k8(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    emulate::mma_m16n8k8_tf32(d, a, b);
}

NXRT_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) { emulate::ldmatrix(r, 4, row, false); }
NXRT_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { emulate::ldmatrix(r, 4, row, true); }
NXRT_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row) { emulate::ldmatrix(r, 2, row, false); }
NXRT_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) { emulate::ldmatrix(r, 2, row, true); }

// Of a matrix of 8 rows of 8 halves, a lane gives M[g][t..t+2] and gets M[t..t+2][g].
NXRT_DEVICE uint32_t transpose_8x8(uint32_t x) {
    const unsigned g = lane_id() / 4, t = lane_id() % 4 * 2;
    const uint32_t a = __shfl_sync(kFullMask, x, static_cast<int>(t * 4 + g / 2));
    const uint32_t b = __shfl_sync(kFullMask, x, static_cast<int>((t + 1) * 4 + g / 2));
    return __byte_perm(a, b, g % 2 ? 0x7632 : 0x5410);
}

NXRT_DEVICE void stmatrix_x4_trans(const uint32_t (&r)[4], void* row) {
    const unsigned lane = lane_id();
    for (unsigned m = 0; m < 4; ++m) {
        uint16_t values[8];
        for (unsigned i = 0; i < 8; ++i) {
            const uint32_t pair = __shfl_sync(kFullMask, r[m], static_cast<int>(i * 4 + lane % 8 / 2));
            values[i] = static_cast<uint16_t>(pair >> lane % 2 * 16);
        }
        emulate::check_aligned(row, 16);
        if (lane / 8 == m) __builtin_memcpy(row, values, sizeof values);
    }
}

NXRT_DEVICE void cp_async_16(void* shared, const void* global, bool valid = true) {
    emulate::cp_async(shared, global, 16, valid);
}
NXRT_DEVICE void cp_async_4(void* shared, const void* global, bool valid = true) {
    emulate::cp_async(shared, global, 4, valid);
}
NXRT_DEVICE void cp_async_commit() { emulate::cp_async_commit(); }
template <int N>
NXRT_DEVICE void cp_async_wait() {
    emulate::cp_async_wait(N);
}

template <unsigned Table>
NXRT_DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r = 0;
    for (unsigned i = 0; i < 8; ++i) {
        if (Table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
    return r;
}
NXRT_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

#else

namespace detail {
NXRT_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
}  // namespace detail

#define NXRT_MMA_M16N8K16(T, type)                                                                            \
    template <>                                                                                               \
    NXRT_DEVICE void mma_m16n8k16<T>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {         \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                   \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                   \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                     \
    }
NXRT_MMA_M16N8K16(half, "f16")
NXRT_MMA_M16N8K16(bf16, "bf16")
#undef NXRT_MMA_M16N8K16

NXRT_DEVICE void mma_m16n8k8(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// Matrices of 8 rows of 16 bytes in shared memory: lane i holds the address of row i % 8 of matrix i / 8 (lanes past the
// last matrix are ignored), and gets in r[m] columns t, t+1 of row g of matrix m, or with _trans rows t, t+1 of column g.
#define NXRT_LDMATRIX_X4(name, modifier)                                                             \
    NXRT_DEVICE void name(uint32_t (&r)[4], const void* row) {                                       \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" modifier ".shared.b16 {%0, %1, %2, %3}, [%4];"  \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                \
                     : "r"(detail::shared_address(row))                                              \
                     : "memory");                                                                    \
    }
#define NXRT_LDMATRIX_X2(name, modifier)                                                    \
    NXRT_DEVICE void name(uint32_t (&r)[2], const void* row) {                              \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" modifier ".shared.b16 {%0, %1}, [%2];" \
                     : "=r"(r[0]), "=r"(r[1])                                               \
                     : "r"(detail::shared_address(row))                                     \
                     : "memory");                                                           \
    }
NXRT_LDMATRIX_X4(ldmatrix_x4, "")
NXRT_LDMATRIX_X4(ldmatrix_x4_trans, ".trans")
NXRT_LDMATRIX_X2(ldmatrix_x2, "")
NXRT_LDMATRIX_X2(ldmatrix_x2_trans, ".trans")
#undef NXRT_LDMATRIX_X4
#undef NXRT_LDMATRIX_X2

// sm_90: four matrices of which a lane has in r[m] rows t, t+1 of column g, stored to rows whose addresses lanes hold as above.
NXRT_DEVICE void stmatrix_x4_trans(const uint32_t (&r)[4], void* row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(detail::shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Of a matrix of 8 rows of 8 halves, a lane gives M[g][t..t+2] and gets M[t..t+2][g].
NXRT_DEVICE uint32_t transpose_8x8(uint32_t x) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// Copies 16 bytes, both ends aligned to 16; zeros where not valid (`global` is then not read, but must be a fine pointer).
NXRT_DEVICE void cp_async_16(void* shared, const void* global, bool valid = true) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(detail::shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
// The same for 4 bytes.
NXRT_DEVICE void cp_async_4(void* shared, const void* global, bool valid = true) {
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(detail::shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
// Closes this thread's group of copies.
NXRT_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the N newest of this thread's groups are under way. Others' copies need a barrier besides.
template <int N>
NXRT_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

// Any function of three bits, bitwise: Table is the function of 0xF0, 0xCC, 0xAA.
template <unsigned Table>
NXRT_DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(Table));
    return r;
}
// Four of the eight bytes of a (0..3) and b (4..7), picked by the selector's hexadecimal digits.
NXRT_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

#endif

}  // namespace nxrt
