// The blocks that a dynamic index and a mask leave, as ascending lists per query block (or, transposed, per key block).
//
// One warp makes one row: 32 blocks a turn, their places found by counting bits, so the order needs no sorting and no atomics.

extern "C" __global__ void block_lists(
    const unsigned char* __restrict__ chosen,    // diagonals [batch * heads, blocks], or bits [batch * heads, held, blocks]
    const int* __restrict__ slots,               // bits only: [blocks] row of the bits that holds a query block, -1 where none does
    const int* __restrict__ query_blocks,        // [queries] global numbers, ascending
    const int* __restrict__ key_blocks,          // [keys]
    const int* __restrict__ first_min,           // [batch, blocks] smallest and largest first visible position of a query block
    const int* __restrict__ first_max,
    int* __restrict__ partial_count,             // [batch * heads, rows]
    int* __restrict__ partial,                   // [batch * heads, rows, partial_width]
    int* __restrict__ full_count,
    int* __restrict__ full,                      // [batch * heads, rows, full_width]
    int heads, int blocks, int block, int held, int queries, int keys, int partial_width, int full_width, int bitmap, int transposed)
{
    const int lane = threadIdx.x & 31;
    const int rows = transposed ? keys : queries;
    const int others = transposed ? queries : keys;
    const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= rows) return;
    const long long bh = blockIdx.y;
    const int* low = first_min + (bh / heads) * blocks;
    const int* high = first_max + (bh / heads) * blocks;
    const unsigned char* mine = chosen + bh * blocks * (bitmap ? (long long)held : 1LL);
    const int own = transposed ? key_blocks[row] : query_blocks[row];
    int* partial_row = partial + (bh * rows + row) * (long long)partial_width;
    int* full_row = full + (bh * rows + row) * (long long)full_width;
    int partials = 0, fulls = 0;
    for (int begin = 0; begin < others; begin += 32) {
        const int n = begin + lane;
        bool touched = false, whole = false;
        if (n < others) {
            const int other = transposed ? query_blocks[n] : key_blocks[n];
            const int q = transposed ? other : own, k = transposed ? own : other;
            const long long line = bitmap ? slots[q] : 0;
            if (k <= q && line >= 0 && (long long)(k + 1) * block > low[q] && mine[bitmap ? line * blocks + k : q - k]) {
                touched = true;
                whole = k < q && (long long)k * block >= high[q];
            }
        }
        const unsigned is_full = __ballot_sync(0xffffffffu, touched && whole);
        const unsigned is_partial = __ballot_sync(0xffffffffu, touched && !whole);
        const unsigned below = (1u << lane) - 1u;
        // An index that has more than it says: rather an error than a block left out, or memory of others overwritten.
        if (fulls + __popc(is_full) > full_width || partials + __popc(is_partial) > partial_width) __trap();
        if (touched && whole) full_row[fulls + __popc(is_full & below)] = n;
        if (touched && !whole) partial_row[partials + __popc(is_partial & below)] = n;
        fulls += __popc(is_full);
        partials += __popc(is_partial);
    }
    if (lane == 0) {
        full_count[bh * rows + row] = fulls;
        partial_count[bh * rows + row] = partials;
    }
}
