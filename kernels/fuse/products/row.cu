// Several products of one row, behind the norm that makes the row and before the gated activation that takes two of them:
// what gemv.cu does for some rows, with fewer steps from the row's arrival to the results'.
//
// A warp multiplies a slice of the row (256 columns) by tiles of weights (16 outputs), which come into a ring of its own in
// shared memory; the first ones are on their way before the row is there. A tile's products with eight units (32 columns) of a
// slice go to eight columns of matrix products, so that each lane scales what is its own, and no weight is touched one by one:
// a 4-bit integer q is the float kLow + q (or kHigh + q), and the sum of a unit's activations times that offset goes off its
// product. Nobody waits for the row's norm either: a warp of its own makes it, and it goes onto the sums at the end.
//
// A lot is the tiles of one product (gated: of two) that a block's warps take at once; `along` of them share a tile's slices.
#include "segment.cuh"

using namespace nxrt;

constexpr uint32_t kSlice = 256;
// A tile's weights for a slice in 4 bits, or for a quarter of it in 16.
constexpr uint32_t kPieceBytes = 2048;
constexpr uint32_t kPieces = 4;

struct RowParams {
    const void* x;      // [k]
    const void* skip;   // [k], added to x; null: none
    const void* gamma;  // [k]; null: x is not normalised
    void* sum;          // x + skip; null: nobody reads it
    uint32_t k;
    uint32_t along;               // warps that share a tile
    uint32_t along_reciprocal;    // (w * this) >> 16 is w / along, for any warp w
    uint32_t sets;                // of along warps; with them, a block has one warp more where there is a norm
    uint32_t rounds;              // slices that a warp takes of a tile
    uint32_t per_lot;             // tiles (gated: of each product)
    uint32_t lots;                // of 4-bit weights
    uint32_t blocks;              // that take those lots in turn; each block past them takes one tile of 16-bit weights
    uint32_t gated;               // y = silu(x w0^T) * (x w1^T)
    float epsilon;
    float inverse_k;
    uint32_t hastens;             // whether the next kernel reads constants alone before its wait
    uint32_t first[kSegments];    // each 4-bit product's first lot; the largest number: has none of its own
    Segment segments[kSegments];
};

// ---- weights ----

// Four-bit integers as floats that are off by a constant: kLow for a fragment's row g, kHigh for row g + 8.
template <class T>
struct Raw;
template <>
struct Raw<half> {
    static constexpr float kLow = 1024, kHigh = 64;
    static constexpr uint32_t kOnes = 0x3c003c00;
    static NXRT_DEVICE void decode(uint32_t (&a)[4], uint32_t x) {
        const uint32_t y = x >> 8;
        a[0] = lop3<0xEA>(x, 0x000f000f, kHalf1024);
        a[1] = lop3<0xEA>(x, 0x00f000f0, kHalf64);
        a[2] = lop3<0xEA>(y, 0x000f000f, kHalf1024);
        a[3] = lop3<0xEA>(y, 0x00f000f0, kHalf64);
    }
};
template <>
struct Raw<bf16> {
    static constexpr float kLow = 128, kHigh = 128;
    static constexpr uint32_t kOnes = 0x3f803f80;
    static NXRT_DEVICE void decode(uint32_t (&a)[4], uint32_t x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = lop3<0xEA>(x >> (4 * i), 0x000f000f, kBf128);
    }
};

// A lot's product, and its first tile there.
struct Lot {
    uint32_t segment, tile;

    NXRT_DEVICE Lot(const RowParams& p, uint32_t lot, bool halves) : segment(0), tile(lot - p.blocks) {
        if (halves) {
            for (;; ++segment) {
                const Segment& s = p.segments[segment];
                if (!s.halves) continue;
                if (tile < s.tiles) return;
                tile -= s.tiles;
            }
        }
#pragma unroll
        for (uint32_t s = 1; s < kSegments; ++s)
            if (lot >= p.first[s]) segment = s;
        tile = (lot - p.first[segment]) * p.per_lot;
    }
};

// A warp's place, and its ring of D items: TB tiles (2: the gated pair) of one slice. In a stage the tiles' weights lie first,
// then each one's scales and zero points. A block of 4-bit weights is kUnit << SHIFT columns; BYTES: with zero points, not 8.
template <uint32_t TB, uint32_t D, uint32_t SHIFT, bool BYTES>
struct Ring {
    static constexpr uint32_t kTiles = TB, kDepth = D, kShift = SHIFT;
    static constexpr bool kBytes = BYTES;
    static constexpr uint32_t kScaleBytes = kSlice >> SHIFT, kZeroBytes = BYTES ? kScaleBytes / 4 : 0;
    static constexpr uint32_t kRestBytes = kScaleBytes + kZeroBytes, kStageBytes = TB * (kPieceBytes + kRestBytes);
    const RowParams& p;
    uint32_t lane, set, way;
    bool halves;
    uint8_t *stages, *stage;  // the first, and the one whose turn it is: this lane's bytes
    // The next item: its lot, round, and (16-bit weights) which of the set's pieces of the slice; its first column, and where
    // this lane's bytes of it are.
    uint32_t lot, round, repeat, repeats, column;
    const uint8_t *data[TB], *scales[TB], *zeros[TB];

    NXRT_DEVICE Ring(const RowParams& params, uint8_t* shared) : p(params), lane(lane_id()) {
        set = (warp_id() * p.along_reciprocal) >> 16;
        way = warp_id() - set * p.along;
        halves = blockIdx.x >= p.blocks;
        stages = stage = shared + warp_id() * (D * kStageBytes) + lane * 16;
        repeats = D > 1 && halves ? (kPieces + p.sets - 1) / p.sets : 1;
        lot = blockIdx.x;
        locate(Lot(p, lot, halves));
    }

    // To the first item of a lot.
    NXRT_DEVICE void locate(const Lot& of) {
        round = repeat = 0;
        column = way * kSlice;
#pragma unroll
        for (uint32_t b = 0; b < TB; ++b) {
            const Segment& s = p.segments[TB == 2 ? b : of.segment];
            // What lies past the last tile is multiplied, but not stored.
            const uint64_t tile = min(of.tile + (halves ? 0 : set), s.tiles - 1);
            const uint32_t piece = halves ? way * kPieces + set : way;
            data[b] = s.data + tile * (p.k * (halves ? 32 : 8)) + piece * kPieceBytes + lane * 16;
            scales[b] = static_cast<const uint8_t*>(s.scales) + tile * (p.k >> SHIFT) + way * kScaleBytes + lane * 16;
            zeros[b] = static_cast<const uint8_t*>(s.zeros) + tile * (p.k >> (2 + SHIFT)) + way * kZeroBytes + lane * 16;
        }
    }

    // To the next item.
    NXRT_DEVICE void advance() {
        if (++repeat < repeats) {
            data[0] += p.sets * kPieceBytes;
            return;
        }
        if (++round == p.rounds) {
            lot += p.blocks;
            if (!halves && lot < p.lots) locate(Lot(p, lot, false));
            return;
        }
        column += p.along * kSlice;
#pragma unroll
        for (uint32_t b = 0; b < TB; ++b) {
            data[b] += (halves ? p.along * kPieces - (repeats - 1) * p.sets : p.along) * kPieceBytes;
            scales[b] += p.along * kScaleBytes;
            zeros[b] += p.along * kZeroBytes;
        }
        repeat = 0;
    }

    // The next stage's turn.
    NXRT_DEVICE void turn() {
        stage += kStageBytes;
        if (stage == stages + D * kStageBytes) stage = stages;
    }

    // Starts the next item's copies, those of what lies past column K being zeros, and moves on.
    NXRT_DEVICE void load() {
        if (halves) {
            const uint32_t piece = repeat * p.sets + set;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                cp_async_16(stage + i * 512, data[0] + i * 512, piece < kPieces && column + piece * kChunk < p.k);
        } else {
#pragma unroll
            for (uint32_t b = 0; b < TB; ++b) {
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i)
                    cp_async_16(stage + b * kPieceBytes + i * 512, data[b] + i * 512, column + i / 2 * kGroupColumns < p.k);
                uint8_t* const rest = stage + TB * kPieceBytes + b * kRestBytes;
                if (lane * 16 < kScaleBytes) cp_async_16(rest, scales[b], column + (lane * 16 << SHIFT) < p.k);
                if constexpr (BYTES) {
                    const bool valid = column + (lane * 64 << SHIFT) < p.k;
                    if (lane * 16 < kZeroBytes) cp_async_16(rest + kScaleBytes, zeros[b], valid);
                }
            }
        }
        if (D > 1) advance();
    }
};

// ---- the row ----

// A slice of the row as second operand: this lane's eight columns of unit g. Of units 2 t and 2 t + 1, the sum and the power of
// two that their columns were divided by.
struct alignas(16) Slice {
    uint32_t x[4];
    float sums[2], factors[2];
};

// Eight elements of a row, from `at` on.
template <class T>
NXRT_DEVICE Vec<uint32_t, 4> load_eight(const void* row, uint32_t at) {
    return load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(static_cast<const T*>(row) + at));
}

// Of x, with skip.
template <class T>
NXRT_DEVICE void load_row(float2 (&v)[4], const RowParams& p, uint32_t at, bool inside) {
    Vec<uint32_t, 4> x = {}, skip = {};
    if (inside) x = load_eight<T>(p.x, at);
    if (inside && p.skip) skip = load_eight<T>(p.skip, at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 a = Pair<T>::floats(x[i]), b = Pair<T>::floats(skip[i]);
        v[i] = make_float2(a.x + b.x, a.y + b.y);
    }
}

// The slice at column `at` of this lane, `gamma` times the row. Not normalised yet, its products could leave a half's range: so
// each unit comes down to below 2.
template <class T>
NXRT_DEVICE Slice prepare(const RowParams& p, uint32_t at, const Vec<uint32_t, 4>& gamma) {
    const bool inside = at < p.k;
    const uint32_t t = lane_id() % 4;
    Slice to;
    if (!p.gamma) {
        Vec<uint32_t, 4> x = {};
        if (inside) x = load_eight<T>(p.x, at);
#pragma unroll
        for (int i = 0; i < 4; ++i) to.x[i] = x[i];
        to.factors[0] = to.factors[1] = 1;
    } else {
        float2 v[4];
        load_row<T>(v, p, at, inside);
        float most = 1e-30f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 factor = Pair<T>::floats(gamma[i]);
            v[i] = make_float2(v[i].x * factor.x, v[i].y * factor.y);
            most = fmaxf(most, fmaxf(fabsf(v[i].x), fabsf(v[i].y)));
        }
        most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 1));
        most = fminf(fmaxf(most, __shfl_xor_sync(kFullMask, most, 2)), 1e30f);
        const uint32_t exponent = __float_as_uint(most) & 0x7f800000u;
        const float down = __uint_as_float((254u << 23) - exponent);
#pragma unroll
        for (int i = 0; i < 4; ++i) to.x[i] = as_word(Pair<T>::from_floats(v[i].x * down, v[i].y * down));
        to.factors[0] = __uint_as_float(__shfl_sync(kFullMask, exponent, static_cast<int>(t * 8)));
        to.factors[1] = __uint_as_float(__shfl_sync(kFullMask, exponent, static_cast<int>(t * 8 + 4)));
    }
    const uint32_t ones[4] = {Raw<T>::kOnes, Raw<T>::kOnes, Raw<T>::kOnes, Raw<T>::kOnes};
    float c[4] = {};
    mma_m16n8k16<T>(c, ones, {to.x[0], to.x[1]});
    mma_m16n8k16<T>(c, ones, {to.x[2], to.x[3]});
    to.sums[0] = c[0];
    to.sums[1] = c[1];
    return to;
}

// The inverse of the row's root mean square, and the sum of x and skip, by one warp.
template <class T>
NXRT_DEVICE void measure(const RowParams& p, float* inverse) {
    grid_dependency_ready();
    float squares = 0;
#pragma unroll 4
    for (uint32_t at = lane_id() * 8; at < p.k; at += kWarpSize * 8) {
        float2 v[4];
        load_row<T>(v, p, at, true);
        Vec<uint32_t, 4> sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            squares = fmaf(v[i].x, v[i].x, fmaf(v[i].y, v[i].y, squares));
            sum[i] = as_word(Pair<T>::from_floats(v[i].x, v[i].y));
        }
        if (p.sum && blockIdx.x == 0) store_vec<uint32_t, 4>(reinterpret_cast<uint32_t*>(static_cast<T*>(p.sum) + at), sum);
    }
    squares = warp_sum(squares);
    if (lane_id() == 0) *inverse = rsqrtf(fmaf(squares, p.inverse_k, p.epsilon));
}

// ---- products ----

// Adds an item's products: of each tile, rows g and g + 8 with units 2 t and 2 t + 1.
template <class T, class R>
NXRT_DEVICE void multiply(float (&sum)[R::kTiles][2], const R& ring, const Slice& x) {
    constexpr uint32_t TB = R::kTiles;
    const uint32_t g = ring.lane / 4, t = ring.lane % 4;
    float low[TB][2] = {}, high[TB][2] = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
        for (uint32_t b = 0; b < TB; ++b) {
            const auto words = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(ring.stage + b * kPieceBytes + i * 512));
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                float c[4] = {};
                uint32_t a[4];
                Raw<T>::decode(a, words[2 * u]);
                mma_m16n8k16<T>(c, a, {x.x[0], x.x[1]});
                Raw<T>::decode(a, words[2 * u + 1]);
                mma_m16n8k16<T>(c, a, {x.x[2], x.x[3]});
                // Unit 2 i + u meets itself in column 2 i + u alone.
                if (t == i) {
                    low[b][u] = c[u];
                    high[b][u] = c[2 + u];
                }
            }
        }
#pragma unroll
    for (uint32_t b = 0; b < TB; ++b)
#pragma unroll
        for (uint32_t u = 0; u < 2; ++u) {
            const uint8_t* const rest = ring.stage - ring.lane * 16 + TB * kPieceBytes + b * R::kRestBytes;
            const uint32_t pair = (2 * t + u) >> R::kShift << 3 | g;
            const float2 scale = Pair<T>::floats(reinterpret_cast<const uint32_t*>(rest)[pair]);
            const uint32_t zero = R::kBytes ? rest[R::kScaleBytes + pair] : 0x88;
            const float offsets[2] = {Raw<T>::kLow + static_cast<float>(zero & 0xf),
                                      Raw<T>::kHigh + static_cast<float>(zero >> 4)};
            sum[b][0] = fmaf(fmaf(-offsets[0], x.sums[u], low[b][u]) * x.factors[u], scale.x, sum[b][0]);
            sum[b][1] = fmaf(fmaf(-offsets[1], x.sums[u], high[b][u]) * x.factors[u], scale.y, sum[b][1]);
        }
}

// The same for a piece of 16-bit weights.
template <class T, class R>
NXRT_DEVICE void multiply_halves(float (&sum)[R::kTiles][2], const R& ring, uint32_t piece, const Slice& x) {
#pragma unroll
    for (uint32_t u = 0; u < 2; ++u) {
        float c[4] = {};
#pragma unroll
        for (uint32_t f = 0; f < 2; ++f) {
            const auto words = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(ring.stage + (u * 2 + f) * 512));
            mma_m16n8k16<T>(c, {words[0], words[1], words[2], words[3]}, {x.x[2 * f], x.x[2 * f + 1]});
        }
        if (ring.lane % 4 == piece) {
            sum[0][0] = fmaf(c[u], x.factors[u], sum[0][0]);
            sum[0][1] = fmaf(c[2 + u], x.factors[u], sum[0][1]);
        }
    }
}

// ---- the results ----

// What the warps have of a block's outputs: for each lot, row and warp that shares it a float. Pitch: whole vectors.
struct Sums {
    float* at;
    uint32_t ways, pitch, lot_rows;

    NXRT_DEVICE Sums(const RowParams& p, float* shared, bool halves) : at(shared) {
        ways = halves ? p.along * p.sets : p.along;
        pitch = (ways + 3) / 4 * 4;
        lot_rows = halves ? kTileRows : p.per_lot * (p.gated ? 2 : 1) * kTileRows;
    }
    // Ways that are none count as zero.
    NXRT_DEVICE void clear(uint32_t lots) const {
        for (uint32_t i = threadIdx.x; pitch != ways && i < lots * lot_rows * pitch; i += blockDim.x) at[i] = 0;
    }
    NXRT_DEVICE float total(uint32_t lot, uint32_t row) const {
        const float* const from = at + (lot * lot_rows + row) * pitch;
        float sum = 0;
#pragma unroll 1
        for (uint32_t w = 0; w < pitch; w += 4) {
            const auto v = load_vec<float, 4>(from + w);
            sum += (v[0] + v[1]) + (v[2] + v[3]);
        }
        return sum;
    }
};

// Leaves tiles' sums over the lanes that share their rows, from row `row` on.
template <uint32_t TB>
NXRT_DEVICE void leave(float (&sum)[TB][2], const Sums& sums, uint32_t row, uint32_t way) {
    const uint32_t g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (uint32_t b = 0; b < TB; ++b) {
        float own = t % 2 ? sum[b][1] : sum[b][0];
        own += __shfl_xor_sync(kFullMask, t % 2 ? sum[b][0] : sum[b][1], 1);
        own += __shfl_xor_sync(kFullMask, own, 2);
        if (t < 2) sums.at[(row + b * kTileRows + g + 8 * t) * sums.pitch + way] = own;
        sum[b][0] = sum[b][1] = 0;
    }
}

// Output `i` of a lot, its sums being the block's `which`-th.
template <class T>
NXRT_DEVICE void finish(const RowParams& p, const Sums& sums, const Lot& lot, uint32_t which, uint32_t i, float inverse) {
    const Segment& s = p.segments[lot.segment];
    const uint32_t n = lot.tile * kTileRows + i;
    if (n >= s.n) return;
    auto value = [&](const Segment& of, uint32_t row) {
        const float bias = of.bias ? to_float(static_cast<const T*>(of.bias)[n]) : 0.0f;
        return fmaf(sums.total(which, row), inverse, bias);
    };
    float y;
    if (p.gated) {
        const uint32_t row = i / kTileRows * (2 * kTileRows) + i % kTileRows;
        const float gate = value(p.segments[0], row);
        y = gate / (1.0f + __expf(-gate)) * value(p.segments[1], row + kTileRows);
    } else {
        y = value(s, i);
    }
    static_cast<T*>(s.y)[n] = from_float<T>(y);
}

// ---- all of it ----

// A warp's items. `slices`: this lane's place for the row's slices, where there are several.
template <class T, class R>
NXRT_DEVICE void work(const RowParams& p, R& ring, const Sums& sums, uint32_t items, Slice* slices) {
    constexpr uint32_t D = R::kDepth;
    const uint32_t repeats = ring.repeats, column = ring.column + ring.lane * 8;
#pragma unroll 1
    for (uint32_t d = 0; d < D; ++d) {
        if (d < items) ring.load();
        cp_async_commit();
        ring.turn();
    }
    auto factors = [&](uint32_t at) {
        Vec<uint32_t, 4> gamma = {};
        if (p.gamma && at < p.k) gamma = load_eight<T>(p.gamma, at);
        return gamma;
    };
    const Vec<uint32_t, 4> gamma = factors(column);
    grid_dependency_ready();
    Slice x = prepare<T>(p, column, gamma);
    if (D > 1 && p.rounds > 1) {
        slices[0] = x;
        for (uint32_t r = 1; r < p.rounds; ++r) {
            const uint32_t at = column + r * p.along * kSlice;
            slices[r * kWarpSize] = prepare<T>(p, at, factors(at));
        }
    }
    float sum[R::kTiles][2] = {};
    uint32_t round = 0, repeat = 0, row = ring.halves ? 0 : ring.set * R::kTiles * kTileRows;
    for (uint32_t i = 0; i < items; ++i) {
        cp_async_wait<D - 1>();
        __syncwarp();
        if (D > 1 && p.rounds > 1) x = slices[round * kWarpSize];
        if (ring.halves) multiply_halves<T>(sum, ring, repeat * p.sets + ring.set, x);
        else multiply<T>(sum, ring, x);
        if (D > 1 && i + D < items) {
            __syncwarp();
            ring.load();
        }
        cp_async_commit();
        ring.turn();
        if (D > 1 && ++repeat < repeats) continue;
        repeat = 0;
        if (D > 1 && ++round < p.rounds) continue;
        round = 0;
        leave(sum, sums, row, ring.halves ? warp_id() : ring.way);
        row += sums.lot_rows;
    }
}

// D = 1: each warp has one item. Dynamic shared memory: the rings, 16 bytes, the sums, and the slices of warps with several.
template <class T, class R>
NXRT_DEVICE void row_products(const RowParams& p) {
    constexpr uint32_t D = R::kDepth;
    NXRT_DYNAMIC_SHARED(uint8_t, shared);
    if (p.hastens) grid_dependency_launch();
    const uint32_t workers = p.along * p.sets;
    R ring(p, shared);
    const bool halves = ring.halves;
    const uint32_t lots = D == 1 || halves ? 1 : (p.lots - blockIdx.x + p.blocks - 1) / p.blocks;
    float* const inverse = reinterpret_cast<float*>(shared + workers * (D * R::kStageBytes));
    const Sums sums(p, inverse + 4, halves);
    sums.clear(lots);
    if (sums.pitch != sums.ways) __syncthreads();
    if (warp_id() == workers) {
        measure<T>(p, inverse);
    } else {
        Slice* const slices = reinterpret_cast<Slice*>(sums.at + lots * sums.lot_rows * sums.pitch);
        const uint32_t items = D == 1 ? 1 : lots * p.rounds * ring.repeats;
        work<T>(p, ring, sums, items, slices + warp_id() * p.rounds * kWarpSize + ring.lane);
    }
    __syncthreads();
    const float scale = p.gamma ? *inverse : 1.0f;
    const uint32_t rows = halves ? kTileRows : p.per_lot * kTileRows;
    for (uint32_t i = threadIdx.x; i < rows * lots; i += blockDim.x) {
        const uint32_t which = D == 1 ? 0 : i / rows;
        finish<T>(p, sums, Lot(p, blockIdx.x + which * p.blocks, halves), which, i - which * rows, scale);
    }
}

// `once` is for warps of one item, `ring` for others; `gated` ones take two products' tiles side by side.
#define ROW(block, shift, zeros, bytes, type, T)                                                                          \
    NXRT_KERNEL_EARLY(row_once_##block##_##zeros##_##type, RowParams, (row_products<T, Ring<1, 1, shift, bytes>>), 544)   \
    NXRT_KERNEL_EARLY(row_ring_##block##_##zeros##_##type, RowParams, (row_products<T, Ring<1, 2, shift, bytes>>), 544)   \
    NXRT_KERNEL_EARLY(row_gated_once_##block##_##zeros##_##type, RowParams, (row_products<T, Ring<2, 1, shift, bytes>>), 288) \
    NXRT_KERNEL_EARLY(row_gated_ring_##block##_##zeros##_##type, RowParams, (row_products<T, Ring<2, 4, shift, bytes>>), 288)
#define ROWS(block, shift, type, T)          \
    ROW(block, shift, plain, false, type, T) \
    ROW(block, shift, bytes, true, type, T)

ROWS(32, 0, f16, half)
ROWS(64, 1, f16, half)
ROWS(128, 2, f16, half)
ROWS(32, 0, bf16, bf16)
ROWS(64, 1, bf16, bf16)
ROWS(128, 2, bf16, bf16)
