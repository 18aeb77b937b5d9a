// Merge partial attention over other keys into out and lse, in place. Each warp handles one row of
// one head, and reads and writes each number once.
//
// With w = 1 / (1 + exp(lse - part_lse)):
//   out += w (part - out), lse = max + log(exp(lse - max) + exp(part_lse - max)).
// Either lse is -inf if the row has no keys on that side.

#define NO_KEYS __int_as_float(0xff800000)  // -inf

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(unsigned short bfloat16)
{
    return __uint_as_float((unsigned)bfloat16 << 16);
}

template <typename Number>
__device__ __forceinline__ void merge_rows(
    float* __restrict__ out,                  // [batch, queries, heads, dim]
    float* __restrict__ lse,                  // [batch, heads, queries]
    const Number* __restrict__ part,          // like out
    const float* __restrict__ part_lse,       // like lse
    long long rows, long long queries, int heads, int dim)
{
    const int lane = threadIdx.x & 31;
    const long long row = (long long)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= rows) return;
    // Rows are ordered as in out: batch, query, head.
    const int head = (int)(row % heads);
    const long long query = row / heads % queries, batch = row / heads / queries;
    const long long at = (batch * heads + head) * queries + query;
    const float before = lse[at], more = part_lse[at];
    if (more == NO_KEYS) return;
    const float top = fmaxf(before, more);
    const float weight = before == NO_KEYS ? 1.0f : 1.0f / (1.0f + __expf(before - more));
    float* mine = out + row * dim;
    const Number* theirs = part + row * dim;
    for (int i = lane; i < dim; i += 32) {
        const float old = mine[i];
        const float part_value = to_float(theirs[i]);
        mine[i] = before == NO_KEYS ? part_value : old + weight * (part_value - old);
    }
    __syncwarp();  // every lane has read lse[at]
    if (lane == 0)
        lse[at] = before == NO_KEYS ? more : top + logf(expf(before - top) + expf(more - top));
}

extern "C" __global__ void merge_float32(
    float* out, float* lse, const float* part, const float* part_lse,
    long long rows, long long queries, int heads, int dim)
{
    merge_rows(out, lse, part, part_lse, rows, queries, heads, dim);
}

extern "C" __global__ void merge_bfloat16(
    float* out, float* lse, const unsigned short* part, const float* part_lse,
    long long rows, long long queries, int heads, int dim)
{
    merge_rows(out, lse, part, part_lse, rows, queries, heads, dim);
}
