// Up to eight rows of input times a matrix of four bits, as long as reading the matrix once takes.
//
// The matrix is the left operand of mma.m16n8k16, the rows are its eight columns. Which column of the matrix meets which input is
// free, as long as both sides agree; so each thread takes the 16 bytes of a row as they lie there, of which a mask and a shift make
// two weights at a time: four bits under the exponent of 128 are 128 + q in bfloat16. Nothing is exchanged between threads. What the
// 128 and the zero points add is taken off with the sums of the inputs, which one more product with ones gives.
//
// The eight warps of a block share the columns and add up at the end. A block stays for several tiles of rows of the matrix, with
// its inputs in shared memory, and asks for the next weights before it multiplies those it has. Defined before: XROWS, rows of
// input; TILES of 16 rows at a time; BLOCKS on a processor; NORM, RESIDUAL, ZERO; GATED (0, 1: SiLU, 2: GELU); EARLY: it may begin
// before the kernel before it has ended, and the one after it likewise.

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int WARPS = 8;
constexpr int AHEAD = 2;  // groups of 128 columns that a warp asks for at a time
constexpr int LINE = 80;  // words of a group's inputs of one row; so two rows lie in other banks

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

struct Some {  // weights of some groups, with their scales and zero points
    uint4 words[AHEAD][TILES][2];
    u16 scale[AHEAD][TILES][2];
    unsigned char zero[AHEAD][TILES][2];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) int4_rows(
    const u16* X, const uint4* W, const u16* SCALE, const unsigned char* ZEROS, const u16* WEIGHTS, const u16* BEFORE, u16* OUT,
    int rows, int n, int k, int x0, int out0, double eps) {
    extern __shared__ __align__(16) u32 inputs[];  // [groups][XROWS][LINE]
    __shared__ float sums[2][WARPS][TILES][16][8];
    __shared__ float squares[WARPS][XROWS];
    constexpr int OWN = GATED ? 8 : 16;  // results of a tile: gates are its upper half, what they gate its lower
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int groups = k / 128, share = (groups + WARPS - 1) / WARPS;
    const int first = warp * share, end = min(first + share, groups);
    const int blocks = (n + OWN * TILES - 1) / (OWN * TILES);

    auto ask = [&](Some& some, int block, int base) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = min((block * TILES + tile) * OWN + g + (GATED ? 0 : 8 * half), n - 1);
                if (GATED && half) row += n;
                const uint4* line = W + (long)row * (k / 32) + t;
                const long at = (long)row * groups;
#pragma unroll
                for (int a = 0; a < AHEAD; a++) some.words[a][tile][half] = __ldcs(line + min(base + a, end - 1) * 4);
#pragma unroll
                for (int a = 0; a < AHEAD; a++) {
                    some.scale[a][tile][half] = SCALE[at + min(base + a, end - 1)];
                    if (ZERO) some.zero[a][tile][half] = ZEROS[at + min(base + a, end - 1)];
                }
            }
    };

    // The sums of all warps of a block; another warp finishes each time.
    auto finish = [&](const float (&total)[TILES][4], int block, int turn) {
        auto mine = sums[turn % 2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int c = 0; c < 4; c++) mine[warp][tile][g + 8 * (c / 2)][2 * t + c % 2] = total[tile][c];
        __syncthreads();
        for (int each = (threadIdx.x + 32 * turn) % (32 * WARPS); each < TILES * OWN * XROWS; each += 32 * WARPS) {
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
                factor = rsqrtf(all / k + (float)eps);
            }
            made *= factor;
            if (GATED) made = activated(wide(narrow(made))) * wide(narrow(gated * factor));
            if (RESIDUAL) made += wide(BEFORE[(long)m * out0 + result]);
            OUT[(long)m * out0 + result] = narrow(made);
        }
    };

    Some now, next;
    if (first < end) ask(now, blockIdx.x, first);
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
            const uint2 read = *(const uint2*)(X + (long)min(m, rows - 1) * x0 + column);
            u16 x[4] = {(u16)read.x, (u16)(read.x >> 16), (u16)read.y, (u16)(read.y >> 16)};
            if (NORM) {
                const u16 by[4] = {(u16)norm.x, (u16)(norm.x >> 16), (u16)norm.y, (u16)(norm.y >> 16)};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float value = wide(x[e]);
                    square[m] += value * value;
                    x[e] = narrow(value * wide(by[e]));
                }
            }
            // Columns c and c + 64 are the two halves of a word.
            u16* to = (u16*)&inputs[(group * XROWS + m) * LINE + 4 * (lane % 16)] + lane / 16;
#pragma unroll
            for (int e = 0; e < 4; e++) to[2 * e] = x[e];
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
    int turn = 0;
    for (int block = blockIdx.x; block < blocks; block += gridDim.x, turn++) {
        float total[TILES][4] = {};
        for (int base = first; base < end; base += AHEAD) {
            const bool last = base + AHEAD >= end;
            if (!last || block + gridDim.x < blocks) ask(next, last ? block + gridDim.x : block, last ? first : base + AHEAD);
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (base + a >= end) break;
                u32 b[4][4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32* from = inputs + ((base + a) * XROWS + min(g, XROWS - 1)) * LINE + 16 * i + 4 * t;
                    const uint4 read = *(const uint4*)from;
                    b[i][0] = read.x, b[i][1] = read.y, b[i][2] = read.z, b[i][3] = read.w;
                }
                float ones[4] = {};
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    mma(ones, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, b[0][w], b[1][w]);
                    mma(ones, 0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80, b[2][w], b[3][w]);
                }
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    float part[4] = {};
                    const uint4 up = now.words[a][tile][0], low = now.words[a][tile][1];
                    const u32 above[4] = {up.x, up.y, up.z, up.w}, below[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        mma(part, pair(above[w], 0), pair(below[w], 0), pair(above[w], 1), pair(below[w], 1), b[0][w], b[1][w]);
                        mma(part, pair(above[w], 2), pair(below[w], 2), pair(above[w], 3), pair(below[w], 3), b[2][w], b[3][w]);
                    }
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const float zero = 128.0f + (ZERO ? (float)now.zero[a][tile][c / 2] : 8.0f);
                        total[tile][c] += (part[c] - zero * ones[c]) * wide(now.scale[a][tile][c / 2]);
                    }
                }
            }
            now = next;
        }
        finish(total, block, turn);
    }
}
