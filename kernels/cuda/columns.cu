// Gather single key columns into packed keys and values; add their gradients back in a fixed order.

// One warp copies one row of a packed tensor, 16 bytes per lane.
extern "C" __global__ void pack_columns(
    const uint4* __restrict__ k,    // [batch, keys, kv_heads, row], row in units of 16 bytes
    const uint4* __restrict__ v,
    const int* __restrict__ slots,  // [batch, heads, width] key slot of each column, -1 = none
    uint4* __restrict__ packed_k,   // [batch, heads, width, row]
    uint4* __restrict__ packed_v,
    long long k_batch, long long k_token, long long k_head,
    long long v_batch, long long v_token, long long v_head,
    int heads, int group, int width, int row)
{
    const int lane = threadIdx.x & 31;
    const int column = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (column >= width) return;
    const long long bh = blockIdx.y;
    const long long batch = bh / heads, kv_head = (bh % heads) / group;
    const int slot = slots[bh * width + column];
    const long long to = (bh * width + column) * row;
    for (int i = lane; i < row; i += 32) {
        uint4 key = make_uint4(0, 0, 0, 0), value = key;
        if (slot >= 0) {
            key = k[batch * k_batch + slot * k_token + kv_head * k_head + i];
            value = v[batch * v_batch + slot * v_token + kv_head * v_head + i];
        }
        packed_k[to + i] = key;
        packed_v[to + i] = value;
    }
}

__device__ __forceinline__ void add_to(float* target, float value) { *target += value; }

// bfloat16 is the upper half of a float32. Round to nearest even.
__device__ __forceinline__ void add_to(unsigned short* target, float value)
{
    const float sum = __uint_as_float((unsigned)*target << 16) + value;
    const unsigned bits = __float_as_uint(sum);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    *target = nan ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Query heads of a group share a KV head and may have chosen the same column. The warp of the first
// head that has a column owns it: it adds the gradients of all heads, in head order, and the warps
// of later heads return. So one warp writes each row of dk and dv, without atomics.
template <typename Number>
__device__ __forceinline__ void add_columns(
    Number* __restrict__ dk,               // [batch, keys, kv_heads, dim], contiguous
    Number* __restrict__ dv,
    const float* __restrict__ columns_dk,  // [parts, batch, heads, width, dim]
    const float* __restrict__ columns_dv,
    const int* __restrict__ slots,         // [batch, heads, width] ascending, -1 at the end
    int parts, long long part, long long keys, int kv_heads, int group, int width, int dim)
{
    const int lane = threadIdx.x & 31;
    const int column = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const long long bh = blockIdx.y;
    const int heads = kv_heads * group;
    const long long batch = bh / heads;
    const int head = bh % heads, kv_head = head / group, mine = head % group;
    if (column >= width) return;
    const int slot = slots[bh * width + column];
    if (slot < 0) return;
    const long long at = ((batch * keys + slot) * kv_heads + kv_head) * dim;
    for (int other = 0; other < group; ++other) {
        const long long from = batch * heads + kv_head * group + other;
        int place = -1;
        if (other == mine) {
            place = column;
        } else {  // binary search among the columns of the other head
            int low = 0, high = width;
            while (low < high) {
                const int middle = (low + high) >> 1;
                // As an unsigned number, -1 comes after all slots.
                if ((unsigned)slots[from * width + middle] < (unsigned)slot) low = middle + 1;
                else high = middle;
            }
            if (low < width && slots[from * width + low] == slot) place = low;
        }
        if (place < 0) continue;
        if (other < mine) return;  // an earlier head owns this column
        for (int i = lane; i < dim; i += 32) {
            float sum_k = 0.0f, sum_v = 0.0f;
            for (int p = 0; p < parts; ++p) {
                sum_k += columns_dk[p * part + (from * width + place) * dim + i];
                sum_v += columns_dv[p * part + (from * width + place) * dim + i];
            }
            add_to(dk + at + i, sum_k);
            add_to(dv + at + i, sum_v);
        }
    }
}

extern "C" __global__ void add_column_gradients_float32(
    float* dk, float* dv, const float* columns_dk, const float* columns_dv,
    const int* slots,
    int parts, long long part, long long keys, int kv_heads, int group, int width, int dim)
{
    add_columns(
        dk, dv, columns_dk, columns_dv, slots,
        parts, part, keys, kv_heads, group, width, dim);
}

extern "C" __global__ void add_column_gradients_bfloat16(
    unsigned short* dk, unsigned short* dv, const float* columns_dk, const float* columns_dv,
    const int* slots,
    int parts, long long part, long long keys, int kv_heads, int group, int width, int dim)
{
    add_columns(
        dk, dv, columns_dk, columns_dv, slots,
        parts, part, keys, kv_heads, group, width, dim);
}
