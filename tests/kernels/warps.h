// CUDA's keywords for a CPU. The 32 lanes of a warp take turns, each until it ends or the lanes
// synchronise; warps run one after the other. So this tests a kernel's arithmetic and indexing, not
// how its warps interact.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__

struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim;

struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From> To same_bits(From from)
{
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float __expf(float x) { return std::exp(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

struct Warp {
    static constexpr unsigned lanes = 32, stack = 1 << 16;
    std::unique_ptr<char[]> stacks{new char[lanes * stack]};
    ucontext_t lane[lanes], back;
    bool over[lanes];
    unsigned at, word, last_word;  // running lane; votes so far, and of the last ballot
    std::function<void()> body;
};
static Warp warp;
struct Trap {};
static bool trapped;

static void enter()
{
    try { warp.body(); } catch (Trap) { trapped = true; }
    warp.over[warp.at] = true;
    swapcontext(&warp.lane[warp.at], &warp.back);
}

inline void __syncwarp() { swapcontext(&warp.lane[warp.at], &warp.back); }
inline void __trap() { throw Trap(); }

inline unsigned __ballot_sync(unsigned, bool vote)
{
    if (vote) warp.word |= 1u << warp.at;
    __syncwarp();
    return warp.last_word;
}

static void run_warp(unsigned first)
{
    for (unsigned i = 0; i < Warp::lanes; ++i) {
        getcontext(&warp.lane[i]);
        warp.lane[i].uc_stack.ss_sp = warp.stacks.get() + i * Warp::stack;
        warp.lane[i].uc_stack.ss_size = Warp::stack;
        warp.lane[i].uc_link = nullptr;
        warp.over[i] = false;
        makecontext(&warp.lane[i], enter, 0);
    }
    while (!std::all_of(warp.over, warp.over + Warp::lanes, [](bool o) { return o; })) {
        warp.word = 0;
        for (warp.at = 0; warp.at < Warp::lanes; ++warp.at) {
            threadIdx = {first + warp.at, 0, 0};
            if (!warp.over[warp.at]) swapcontext(&warp.back, &warp.lane[warp.at]);
        }
        warp.last_word = warp.word;
    }
}

template <typename T> T argument(uint64_t value)
{
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(value);
    else return static_cast<T>(value);
}

extern "C" int backwards = 0;

// Run every warp of the grid, the last rows first if backwards. Return 1 if one of them trapped.
template <typename... A, size_t... I>
int run(
    void (*kernel)(A...), unsigned across, unsigned down, unsigned threads, const uint64_t* values,
    std::index_sequence<I...>)
{
    trapped = false;
    warp.body = [=] { kernel(argument<A>(values[I])...); };
    blockDim = {threads, 1, 1};
    for (unsigned y = 0; y < down; ++y) for (unsigned x = 0; x < across; ++x) {
        blockIdx = {x, backwards ? down - 1 - y : y, 0};
        for (unsigned first = 0; first < threads; first += Warp::lanes) run_warp(first);
    }
    return trapped;
}

template <typename... A> constexpr auto places_of(void (*)(A...))
{
    return std::index_sequence_for<A...>();
}
