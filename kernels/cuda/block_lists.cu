// List the blocks that the index chose and the mask allows, ascending, per query block or
// (transposed) per key block.
//
// One warp writes one row, 32 candidate blocks at a time. A ballot and a bit count give each lane
// its place in the list, so the order needs no sorting and no atomics.

extern "C" __global__ void block_lists(
    const unsigned char* __restrict__ chosen,  // diagonals [batch * heads, blocks], or, if bitmap,
                                               // bits [batch * heads, held, blocks]
    const int* __restrict__ slots,         // bitmap: [blocks], row of bits of a query block, or -1
    const int* __restrict__ query_blocks,  // [queries] global block numbers, ascending
    const int* __restrict__ key_blocks,    // [keys]
    const int* __restrict__ first_min,     // [batch, blocks] minimum and maximum, over a query
    const int* __restrict__ first_max,     // block, of the first position that a query sees
    int* __restrict__ partial_count,       // [batch * heads, rows]
    int* __restrict__ partial,             // [batch * heads, rows, partial_width]
    int* __restrict__ full_count,
    int* __restrict__ full,                // [batch * heads, rows, full_width]
    int heads, int blocks, int block, int held, int queries, int keys,
    int partial_width, int full_width, int bitmap, int transposed,
    int front)                             // key blocks before the first; their rows are not written
{
    const int lane = threadIdx.x & 31;
    const int rows = transposed ? keys : queries;
    const int others = transposed ? queries : keys;
    const int before = transposed ? front : 0, shift = transposed ? 0 : front;
    const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= rows) return;
    const long long bh = blockIdx.y;
    const int* low = first_min + (bh / heads) * blocks;
    const int* high = first_max + (bh / heads) * blocks;
    const unsigned char* mine = chosen + bh * blocks * (bitmap ? (long long)held : 1LL);
    const int own = transposed ? key_blocks[row] : query_blocks[row];
    const long long place = bh * (before + rows) + before + row;
    int* partial_row = partial + place * partial_width;
    int* full_row = full + place * full_width;
    int partials = 0, fulls = 0;
    for (int begin = 0; begin < others; begin += 32) {
        const int n = begin + lane;
        bool touched = false, whole = false;
        if (n < others) {
            const int other = transposed ? query_blocks[n] : key_blocks[n];
            const int q = transposed ? other : own, k = transposed ? own : other;
            const long long line = bitmap ? slots[q] : 0;
            const bool visible = k <= q && (long long)(k + 1) * block > low[q];
            if (visible && line >= 0 && mine[bitmap ? line * blocks + k : q - k]) {
                touched = true;
                whole = k < q && (long long)k * block >= high[q];
            }
        }
        const unsigned is_full = __ballot_sync(0xffffffffu, touched && whole);
        const unsigned is_partial = __ballot_sync(0xffffffffu, touched && !whole);
        const unsigned below = (1u << lane) - 1u;
        // If the index has more blocks than the host allocated, stop: do not drop a block or write
        // past the row.
        if (fulls + __popc(is_full) > full_width) __trap();
        if (partials + __popc(is_partial) > partial_width) __trap();
        if (touched && whole) full_row[fulls + __popc(is_full & below)] = n + shift;
        if (touched && !whole) partial_row[partials + __popc(is_partial & below)] = n + shift;
        fulls += __popc(is_full);
        partials += __popc(is_partial);
    }
    if (lane == 0) {
        full_count[place] = fulls;
        partial_count[place] = partials;
    }
}
