#include "walk.cuh"

using namespace nxrt;

// `cuda.rs` has the same codes.
enum PadMode : uint32_t { kConstant, kReflect, kEdge, kWrap };

struct PadParams {
    const void* x;
    const void* value;  // null: `constant`
    void* y;
    uint64_t n;
    uint64_t constant;
    uint64_t dims[8];  // of y
    int64_t strides[8];  // of x
    int64_t before[8];   // `lengths` elements of x from `starts` on lie there
    int64_t starts[8];
    int64_t lengths[8];
    uint32_t rank;
    uint32_t mode;
    uint32_t element;
    uint32_t pad;
};

// The position in x behind position i of y's dim d; false where the constant goes.
NXRT_DEVICE bool source(const PadParams& p, uint32_t d, int64_t i, int64_t& at) {
    const int64_t length = p.lengths[d];
    at = i - p.before[d];
    if (at < 0 || at >= length) {
        if (p.mode == kConstant) return false;
        auto within = [](int64_t v, int64_t n) { return v % n < 0 ? v % n + n : v % n; };
        const int64_t last = length - 1;
        if (p.mode == kEdge) {
            at = at < 0 ? 0 : last;
        } else if (p.mode == kWrap) {
            at = within(at, length);
        } else if (last == 0) {
            at = 0;
        } else {
            at = within(at, 2 * last);
            at = at < 2 * last - at ? at : 2 * last - at;
        }
    }
    at += p.starts[d];
    return true;
}

NXRT_DEVICE void pad_each(const PadParams& p) {
    const char* x = static_cast<const char*>(p.x);
    const void* value = p.value ? p.value : &p.constant;
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        uint64_t rest = i;
        int64_t from = 0, at;
        bool inside = true;
        for (uint32_t d = p.rank; d-- > 0;) {
            const uint64_t q = divide(rest, p.dims[d]);
            inside = source(p, d, static_cast<int64_t>(rest - q * p.dims[d]), at) && inside;
            from += at * p.strides[d];
            rest = q;
        }
        const void* element = inside ? x + from * static_cast<int64_t>(p.element) : value;
        copy_word(static_cast<char*>(p.y) + i * p.element, element, p.element, p.element);
    }
}

NXRT_KERNEL(pad, PadParams, pad_each, 256)
