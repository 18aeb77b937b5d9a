// Attention over more keys joins what there is: one warp a row of one head, in place, each number read and written once.
//
// With w = 1 / (1 + exp(lse - part_lse)): out += w (part - out), lse = max + log(exp(lse - max) + exp(part_lse - max)). A row that has seen
// nothing has lse -inf on its side.

#define NOTHING __int_as_float(0xff800000)  // lse of a row that has seen nothing

__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(unsigned short x) { return __uint_as_float((unsigned)x << 16); }

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
    // row counts batch, query, head, as out does.
    const int head = (int)(row % heads);
    const long long query = row / heads % queries, batch = row / heads / queries;
    const long long at = (batch * heads + head) * queries + query;
    const float before = lse[at], more = part_lse[at];
    if (more == NOTHING) return;
    const float top = fmaxf(before, more);
    const float weight = before == NOTHING ? 1.0f : 1.0f / (1.0f + __expf(before - more));
    float* mine = out + row * dim;
    const Number* theirs = part + row * dim;
    for (int i = lane; i < dim; i += 32) {
        const float old = mine[i];
        mine[i] = before == NOTHING ? number(theirs[i]) : old + weight * (number(theirs[i]) - old);
    }
    __syncwarp();  // all lanes have read it
    if (lane == 0) lse[at] = before == NOTHING ? more : top + logf(expf(before - top) + expf(more - top));
}

extern "C" __global__ void merge_float32(
    float* out, float* lse, const float* part, const float* part_lse, long long rows, long long queries, int heads, int dim)
{
    merge_rows(out, lse, part, part_lse, rows, queries, heads, dim);
}

extern "C" __global__ void merge_bfloat16(
    float* out, float* lse, const unsigned short* part, const float* part_lse, long long rows, long long queries, int heads, int dim)
{
    merge_rows(out, lse, part, part_lse, rows, queries, heads, dim);
}
