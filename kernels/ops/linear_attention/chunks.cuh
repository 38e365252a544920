// The recurrence over many tokens as matrix products, for 16-bit queries, a decay of a factor a head, and states that
// one query head reads.
//
// C = 32 tokens at a time (a chunk): with F_c the product of the decays up to token c of the chunk, K, Q, V, D and O
// the tokens' rows k, q, v, d and o, and diag(x) a matrix of x,
//   L_ci = beta_c (F_c / F_i) (k_c k_i), i < c      P_ci = scale (F_c / F_i) (q_c k_i), i <= c
//   U = (1 + L)^-1 diag(beta)
//   D = U (V - diag(F) K S)
//   O = scale diag(F) Q S + P D
//   S = F_last S + K^T diag(F_last / F) D
// Without delta, U = 1 and D = V. What does not depend on the state is made by `prepare` (chunks_prepare.cu), all
// chunks side by side; `walk` (chunks_walk.cu) then takes a sequence's chunks one after the other.
//
// Results are about as good as those of the recurrence itself in f32: sums are f32, keys and queries enter as they are,
// and all other operands as two parts, one of which has the leading bits and one the next.
#pragma once

#include "delta_rule.cuh"
#include "mma.cuh"

namespace nxrt {

constexpr unsigned kChunk = 32;
// Rows of a product's left operand and result.
constexpr unsigned kStrip = 16;
// Elements that a product of tf32 sums over.
constexpr unsigned kTile = 8;
// Left operands of a lower triangular matrix: strip 0 has two, strip 1 four, tile after tile; each has four floats a
// lane.
constexpr unsigned kOperands = 6, kOperand = 4 * kWarpSize;

// What `prepare` leaves of a head's chunk, [U | P | a | r | w | F_last] with the matrices as operands:
//   a_c = F_c (0 without delta)   r_c = scale F_c   w_c = F_last / F_c
// times the inverse norms that belong there.
enum Record : unsigned {
    kInner = 0,
    kOuter = kOperands * kOperand,
    kA = 2 * kOuter,
    kR = kA + kChunk,
    kW = kR + kChunk,
    kLast = kW + kChunk,
    kRecord = kLast + 4,
};

// A chunk's keys or queries in shared memory. Eight rows' same 16 bytes meet no bank twice.
template <class T, unsigned D>
using Tokens = T[kChunk][D + 8];

// Starts the copy of `rows` rows of COLUMNS elements by THREADS threads; zeros beyond. `wide`: they are aligned to 16
// bytes.
template <unsigned THREADS, unsigned COLUMNS, unsigned PITCH, class T>
NXRT_DEVICE void copy_rows(T (&to)[kChunk][PITCH], const T* from, uint64_t stride, uint32_t rows, bool wide) {
    constexpr unsigned kPieces = COLUMNS / 8, kStep = THREADS / kPieces;
    const unsigned thread = threadIdx.x % THREADS;
    if (wide) {
        const unsigned first = thread / kPieces, column = thread % kPieces * 8;
        const T* at = from + first * stride + column;
#pragma unroll
        for (unsigned i = 0; i < kChunk; i += kStep, at += kStep * stride) {
            const bool valid = first + i < rows;
            cp_async_16(&to[first + i][column], valid ? at : from, valid);
        }
    } else {
#pragma unroll 1
        for (unsigned i = thread; i < kChunk * COLUMNS; i += THREADS) {
            const unsigned row = i / COLUMNS, column = i % COLUMNS;
            to[row][column] = row < rows ? from[row * stride + column] : from_float<T>(0.0f);
        }
    }
}

// Whether `copy_rows` finds keys, queries and values aligned; heads have multiples of 8 elements.
NXRT_DEVICE bool aligned_16(const DeltaParams& p) {
    const uintptr_t starts =
        reinterpret_cast<uintptr_t>(p.q) | reinterpret_cast<uintptr_t>(p.k) | reinterpret_cast<uintptr_t>(p.v);
    return starts % 16 == 0 && (p.q_stride | p.k_stride | p.v_stride) % 8 == 0;
}

}  // namespace nxrt
