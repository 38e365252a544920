// Products of a warpgroup (four warps, whole and converged) on Hopper's tensor cores: d += a b, with a in registers and b in
// shared memory. Instructions of sm_90a alone.
#pragma once

#include "mma.cuh"

namespace nxrt {

// b lies in shared memory as rows (its columns, N) of 128 bytes, 64 of K, from an address aligned to 1024 on. The 16-byte
// pieces of row r are permuted: this is where piece c is, in bytes from the first row.
NXRT_DEVICE int wgmma_piece(int r, int c) { return r * 128 + (c ^ (r & 7)) * 16; }

// Each warp's part of d is 16 rows and N columns: d[i] is columns 8 i .. 8 i + 8, as mma_m16n8k16 has it, and a likewise. `b` is
// the first row, `step` (0..3) which 16 of the 64 columns of K. The operands are in use until wgmma_wait says otherwise.
template <class T, int N>
NXRT_DEVICE void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], const uint8_t* b, int step);

#ifdef NXRT_EMULATE

template <class T, int N>
NXRT_DEVICE void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], const uint8_t* b, int step) {
    const int g = int(lane_id() / 4), q = int(lane_id() % 4);
    for (int i = 0; i < N / 8; ++i) {
        uint32_t pair[2];
        for (int h = 0; h < 2; ++h)
            pair[h] = *reinterpret_cast<const uint32_t*>(b + wgmma_piece(8 * i + g, 2 * step + h) + q * 4);
        mma_m16n8k16<T>(d[i], a, pair);
    }
}
NXRT_DEVICE void wgmma_begin() {}
NXRT_DEVICE void wgmma_commit() {}
template <int N>
NXRT_DEVICE void wgmma_wait() {}
NXRT_DEVICE void wgmma_visible() {}
NXRT_DEVICE void wgmma_pin(uint32_t (&)[4]) {}

#else

// What was written to shared memory before this and a barrier can be read by wgmma after it.
NXRT_DEVICE void wgmma_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Between writes to the operands' registers and the first wgmma that takes them.
NXRT_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group.
NXRT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the N newest groups are under way.
template <int N>
NXRT_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}
// Has these values computed before this point.
NXRT_DEVICE void wgmma_pin(uint32_t (&a)[4]) { asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])); }

namespace detail {

// Rows of 128 bytes, permuted over eight rows, eight rows after eight rows.
NXRT_DEVICE uint64_t wgmma_descriptor(const uint8_t* b, int step) {
    const uint32_t address = shared_address(b) + uint32_t(step) * 32;
    return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | (address & 0x3ffff) >> 4;
}

template <class T, int N>
struct Wgmma;

// Ten operands of one group of tens, and the sums of eight strips.
#define NXRT_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define NXRT_STRIP(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define NXRT_STRIPS(i)                                                                                      \
    NXRT_STRIP(i), NXRT_STRIP(i + 1), NXRT_STRIP(i + 2), NXRT_STRIP(i + 3), NXRT_STRIP(i + 4), NXRT_STRIP(i + 5), \
        NXRT_STRIP(i + 6), NXRT_STRIP(i + 7)
#define NXRT_WGMMA(T, type, N, sums, a_and_b, ...)                                                                     \
    template <>                                                                                                        \
    struct Wgmma<T, N> {                                                                                               \
        static NXRT_DEVICE void run(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {                        \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" sums "}, " a_and_b       \
                         ", add, 1, 1, 0;\n}"                                                                          \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };
#define NXRT_WGMMA_64(T, type)                                                                              \
    NXRT_WGMMA(T, type, 64, NXRT_TEN() NXRT_TEN(1) NXRT_TEN(2) "%30,%31", "{%32,%33,%34,%35}, %36", NXRT_STRIPS(0))
#define NXRT_WGMMA_128(T, type)                                                                             \
    NXRT_WGMMA(T, type, 128,                                                                                \
               NXRT_TEN() NXRT_TEN(1) NXRT_TEN(2) NXRT_TEN(3) NXRT_TEN(4) NXRT_TEN(5) "%60,%61,%62,%63",    \
               "{%64,%65,%66,%67}, %68", NXRT_STRIPS(0), NXRT_STRIPS(8))
NXRT_WGMMA_64(half, "f16")
NXRT_WGMMA_64(bf16, "bf16")
NXRT_WGMMA_128(half, "f16")
NXRT_WGMMA_128(bf16, "bf16")
#undef NXRT_WGMMA_128
#undef NXRT_WGMMA_64
#undef NXRT_WGMMA
#undef NXRT_STRIPS
#undef NXRT_STRIP
#undef NXRT_TEN

}  // namespace detail

template <class T, int N>
NXRT_DEVICE void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], const uint8_t* b, int step) {
    detail::Wgmma<T, N>::run(d, a, detail::wgmma_descriptor(b, step));
}

#endif

}  // namespace nxrt
