// List the blocks that the index chose and the mask allows, ascending, per query block or
// (transposed) per key block.
//
// One warp writes one row, 32 candidate blocks at a time. A ballot and a bit count give each lane
// its place in the list, so the order needs no sorting and no atomics.
//
// The key blocks of single columns in front of the keys (`attention.column_blocks`) are partial. A
// query block lists the tiles of its head whose first column is in an earlier block, before its
// other blocks. A tile lists a part of the query blocks after its first column.

extern "C" __global__ void block_lists(
    const unsigned char* __restrict__ chosen,  // diagonals [batch * heads, blocks], or, if bitmap,
                                               // bits [batch * heads, held, blocks]
    const int* __restrict__ slots,         // bitmap: [blocks], row of bits of a query block, or -1
    const int* __restrict__ query_blocks,  // [queries] global block numbers, ascending
    const int* __restrict__ key_blocks,    // [keys]
    const int* __restrict__ first_min,     // [batch, blocks] minimum and maximum, over a query
    const int* __restrict__ first_max,     // block, of the first position that a query sees
    const int* __restrict__ columns,       // [batch * heads, tiles, block] ascending positions
    int* __restrict__ partial_count,       // [batch * heads, rows]; if transposed, first the front's
    int* __restrict__ partial,             // [batch * heads, rows, partial_width]
    int* __restrict__ full_count,
    int* __restrict__ full,                // [batch * heads, rows, full_width]
    int heads, int blocks, int block, int held, int queries, int keys,
    int partial_width, int full_width, int bitmap, int transposed,
    int group, int parts, int tiles)       // the front of a KV head is [group, parts, tiles]
{
    const int lane = threadIdx.x & 31;
    const int rows = transposed ? keys : queries;
    const int others = transposed ? queries : keys;
    const int front = group * parts * tiles;
    const int before = transposed ? front : 0, shift = transposed ? 0 : front;
    const int row = (int)(blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)) - before;
    if (row >= rows) return;
    const long long bh = blockIdx.y;
    const int head_in_group = bh % heads % group;
    const int* first_columns = columns + bh * tiles * block;
    const long long place = bh * (before + rows) + before + row;
    int* partial_row = partial + place * partial_width;
    if (row < 0) {
        const int copy = before + row, tile = copy % tiles, part = copy / tiles % parts;
        int count = 0;
        if (copy / tiles / parts == head_in_group) {
            const int first = first_columns[(long long)tile * block] / block;
            int start = 0, end = queries;  // binary search for the first query block after it
            while (start < end) {
                const int middle = (start + end) >> 1;
                if (query_blocks[middle] <= first) start = middle + 1; else end = middle;
            }
            const int begin = start + (queries - start) * part / parts;
            count = start + (queries - start) * (part + 1) / parts - begin;
            if (count > partial_width) __trap();
            for (int n = lane; n < count; n += 32) partial_row[n] = begin + n;
        }
        if (lane == 0) {
            full_count[place] = 0;
            partial_count[place] = count;
        }
        return;
    }
    const int* low = first_min + (bh / heads) * blocks;
    const int* high = first_max + (bh / heads) * blocks;
    const unsigned char* mine = chosen + bh * blocks * (bitmap ? (long long)held : 1LL);
    const int own = transposed ? key_blocks[row] : query_blocks[row];
    int* full_row = full + place * full_width;
    int partials = 0, fulls = 0;
    for (int begin = 0; !transposed && begin < tiles; begin += 32) {
        const int tile = begin + lane;
        const bool listed = tile < tiles && first_columns[(long long)tile * block] / block < own;
        if (listed) partial_row[tile] = head_in_group * parts * tiles + tile;
        partials += __popc(__ballot_sync(0xffffffffu, listed));
    }
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
