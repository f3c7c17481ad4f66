// Up to eight rows of input times a matrix of four bits, as long as reading the matrix once takes.
//
// The matrix is the left operand of mma.m16n8k16, the rows are its eight columns. Which column of the matrix meets which input is
// free, as long as both sides agree; so each thread takes the 16 bytes of a row as they lie there, of which a mask and a shift make
// two weights at a time: four bits under the exponent of 128 are 128 + q in bfloat16. Nothing is exchanged between threads. What the
// 128 and the zero points add is taken off with the sums of the inputs of a group, which are made once.
//
// The eight warps of a block share the columns and add up at the end. A block stays for several tiles of rows of the matrix, with
// its inputs in shared memory, and asks for the next weights before it multiplies those it has. It is bound by how many instructions
// a weight costs: so the columns are known to the compiler, and what lies where is part of the instructions. Defined before: K,
// columns; XROWS, rows of input; TILES of 16 rows at a time; BLOCKS on a processor; AHEAD, groups that a warp asks for at a time;
// NORM, RESIDUAL, ZERO; GATED (0, 1: SiLU, 2: GELU); EARLY: it may begin before the kernel before it has ended, and the one after
// it likewise.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int GROUPS = K / 128;
constexpr int BATCHES = (GROUPS + WARPS * AHEAD - 1) / (WARPS * AHEAD);  // of a warp, for one tile
constexpr int SHARE = BATCHES * AHEAD;
constexpr bool EVEN = SHARE * WARPS == GROUPS;
constexpr int LINE = 80;  // words of a group's inputs of one row; so two rows lie in other banks
constexpr u32 ONES = 0x3F803F80;  // two in bfloat16

__device__ __forceinline__ float wide(u16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ u16 narrow(float x) {
    u16 made;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(made) : "f"(x));
    return made;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pair(u32 word, int n) {
    u32 made;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(made) : "r"(word >> (4 * n)), "r"(0x43004300));
    return made;
}

__device__ __forceinline__ float activated(float x) {
    float inner = GATED == 1 ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return wide(narrow(x / (1.0f + __expf(-inner))));
}

struct Half {  // eight rows of a tile: where a thread's weights, scales and zero points of them begin
    const uint4* words;
    const u16* scales;
    const u8* zeros;
};

struct Batch {  // weights of some groups, with two scales or zero points in each word
    uint4 words[TILES][2][AHEAD];
    u32 scales[TILES][2][AHEAD / 2];
    u32 zeros[TILES][2][AHEAD / 2];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int4_rows(
    const u16* X, const uint4* W, const u16* SCALES, const u8* ZEROS, const u16* WEIGHTS, const u16* BEFORE, u16* OUT,
    int rows, int n, int x0, int out0, double eps) {
    extern __shared__ __align__(16) u32 inputs[];  // [GROUPS][XROWS][LINE]
    __shared__ float group_sums[GROUPS * XROWS];
    __shared__ float sums[2][WARPS][TILES][16][XROWS];
    __shared__ float squares[WARPS][XROWS];
    constexpr int OWN = GATED ? 8 : 16;  // results of a tile: gates are its upper half, what they gate its lower
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = warp * SHARE, end = EVEN ? first + SHARE : min(first + SHARE, GROUPS);
    const int base = EVEN ? first : min(first, GROUPS - 1), most = max(end - 1 - first, 0);
    const int blocks = (n + OWN * TILES - 1) / (OWN * TILES);

    auto point = [&](Half (&at)[TILES][2], int block) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = min((block * TILES + tile) * OWN + g + (GATED ? 0 : 8 * half), n - 1);
                if (GATED && half) row += n;
                at[tile][half].words = W + (long)row * (K / 32) + base * 4 + t;
                at[tile][half].scales = SCALES + (long)row * GROUPS + base;
                at[tile][half].zeros = ZEROS + (long)row * GROUPS + base;
            }
    };

    // Groups beyond the last are read as the last, and count nothing.
    auto ask = [&](Batch& to, const Half (&at)[TILES][2], int batch) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Half& from = at[tile][half];
#pragma unroll
                for (int a = 0; a < AHEAD; a++) {
                    const int group = batch * AHEAD + a;
                    to.words[tile][half][a] = __ldcs(from.words + 4 * (EVEN ? group : min(group, most)));
                }
#pragma unroll
                for (int a = 0; a < AHEAD / 2; a++) {
                    const int group = batch * AHEAD + 2 * a;
                    if (EVEN && GROUPS % 2 == 0) {
                        to.scales[tile][half][a] = *(const u32*)(from.scales + group);
                        if (ZERO) to.zeros[tile][half][a] = *(const u16*)(from.zeros + group);
                    } else {
                        const int one = min(group, most), two = min(group + 1, most);
                        const u32 low = first + group < end ? from.scales[one] : 0;
                        const u32 high = first + group + 1 < end ? from.scales[two] : 0;
                        to.scales[tile][half][a] = low | high << 16;
                        if (ZERO) to.zeros[tile][half][a] = from.zeros[one] | from.zeros[two] << 8;
                    }
                }
            }
    };

    // The inputs of a group as the right operand.
    auto read = [&](u32 (&b)[4][4], int group) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint4 some = *(const uint4*)(inputs + (group * XROWS + min(g, XROWS - 1)) * LINE + 16 * w + 4 * t);
            b[w][0] = some.x, b[w][1] = some.y, b[w][2] = some.z, b[w][3] = some.w;
        }
    };

    auto multiply = [&](float (&total)[TILES][4], const Batch& with, int batch) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int group = EVEN ? first + batch * AHEAD + a : min(first + batch * AHEAD + a, GROUPS - 1);
            u32 b[4][4];
            read(b, group);
            const float all[2] = {group_sums[group * XROWS + min(2 * t, XROWS - 1)],
                                  XROWS > 1 ? group_sums[group * XROWS + min(2 * t + 1, XROWS - 1)] : 0.0f};
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                float part[4] = {};
                const uint4 up = with.words[tile][0][a], low = with.words[tile][1][a];
                const u32 above[4] = {up.x, up.y, up.z, up.w}, below[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    mma(part, pair(above[w], 0), pair(below[w], 0), pair(above[w], 1), pair(below[w], 1), b[w][0], b[w][1]);
                    mma(part, pair(above[w], 2), pair(below[w], 2), pair(above[w], 3), pair(below[w], 3), b[w][2], b[w][3]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 both = with.scales[tile][half][a / 2];
                    const float scale = __uint_as_float(a % 2 ? both & 0xFFFF0000 : both << 16);
                    float zero = 136.0f;
                    if (ZERO) {  // under the exponent of 128, as the weights
                        const u32 q = with.zeros[tile][half][a / 2];
                        zero = __uint_as_float((a % 2 ? q << 8 & 0x7F0000 : q << 16 & 0x7F0000) | 0x43000000);
                    }
#pragma unroll
                    for (int c = 0; c < (XROWS > 1 ? 2 : 1); c++)
                        total[tile][2 * half + c] += (part[2 * half + c] - zero * all[c]) * scale;
                }
            }
        }
    };

    // The sums of all warps of a block; another warp finishes each time.
    auto finish = [&](const float (&total)[TILES][4], int block, int turn) {
        auto mine = sums[turn % 2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (2 * t + c % 2 < XROWS) mine[warp][tile][g + 8 * (c / 2)][2 * t + c % 2] = total[tile][c];
        __syncthreads();
        for (int each = (threadIdx.x + 32 * turn) % THREADS; each < TILES * OWN * XROWS; each += THREADS) {
            const int m = each / (TILES * OWN), tile = each / OWN % TILES, row = each % OWN;
            const int result = (block * TILES + tile) * OWN + row;
            if (m >= rows || result >= n) continue;
            float made = 0.0f, gated = 0.0f, factor = 1.0f;
            for (int w = 0; w < WARPS; w++) {
                made += mine[w][tile][row][m];
                if (GATED) gated += mine[w][tile][row + 8][m];
            }
            if (NORM) {
                float all = 0.0f;
                for (int w = 0; w < WARPS; w++) all += squares[w][m];
                factor = rsqrtf(all / K + (float)eps);
            }
            made *= factor;
            if (GATED) made = activated(wide(narrow(made))) * wide(narrow(gated * factor));
            if (RESIDUAL) made += wide(BEFORE[(long)m * out0 + result]);
            OUT[(long)m * out0 + result] = narrow(made);
        }
    };

    Half at[TILES][2];
    Batch now, next;
    point(at, blockIdx.x);
    ask(now, at, 0);
#if EARLY
    // Weights are on their way; what other kernels make is there when all of them have ended.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    float square[XROWS] = {};
    for (int group = first; group < end; group++) {
        const int column = group * 128 + 4 * lane;
        uint2 norm;
        if (NORM) norm = *(const uint2*)(WEIGHTS + column);
#pragma unroll
        for (int m = 0; m < XROWS; m++) {
            const uint2 some = *(const uint2*)(X + (long)min(m, rows - 1) * x0 + column);
            u16 x[4] = {(u16)some.x, (u16)(some.x >> 16), (u16)some.y, (u16)(some.y >> 16)};
            if (NORM) {
                const u16 by[4] = {(u16)norm.x, (u16)(norm.x >> 16), (u16)norm.y, (u16)(norm.y >> 16)};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float value = wide(x[e]);
                    square[m] += value * value;
                    x[e] = narrow(value * wide(by[e]));
                }
            }
            // Columns c and c + 64 are the two halves of a word; what a thread reads at a time are the operands of two products.
            u16* to = (u16*)&inputs[(group * XROWS + m) * LINE + 4 * (lane % 4) + lane % 16 / 4] + lane / 16;
#pragma unroll
            for (int e = 0; e < 4; e++) to[32 * e] = x[e];
        }
    }
    if (NORM) {
#pragma unroll
        for (int m = 0; m < XROWS; m++) {
            for (int away = 16; away; away /= 2) square[m] += __shfl_xor_sync(0xFFFFFFFF, square[m], away);
            if (lane == 0) squares[warp][m] = square[m];
        }
    }
    __syncwarp();
    for (int group = first; group < end; group++) {
        u32 b[4][4];
        read(b, group);
        float made[4] = {};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            mma(made, ONES, ONES, ONES, ONES, b[w][0], b[w][1]);
            mma(made, ONES, ONES, ONES, ONES, b[w][2], b[w][3]);
        }
        if (g == 0 && 2 * t < XROWS) group_sums[group * XROWS + 2 * t] = made[0];
        if (g == 0 && 2 * t + 1 < XROWS) group_sums[group * XROWS + 2 * t + 1] = made[1];
    }
    if (EVEN) __syncwarp(); else __syncthreads();  // what is beyond the last group is read, and counts nothing
    int turn = 0;
    for (int block = blockIdx.x; block < blocks; block += gridDim.x, turn++) {
        float total[TILES][4] = {};
#pragma unroll (BATCHES > 4 ? 2 : BATCHES)
        for (int batch = 0; batch < BATCHES; batch++) {
            if (batch + 1 < BATCHES) {
                ask(next, at, batch + 1);
            } else if (block + gridDim.x < blocks) {
                point(at, block + gridDim.x);
                ask(next, at, 0);
            }
            multiply(total, now, batch);
            now = next;
        }
        finish(total, block, turn);
    }
}
