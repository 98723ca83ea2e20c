// The products of Hopper's warpgroups, m64nNk16 of fp16 or bf16 with fp32 sums: d = a b, plus d where `accumulate`. One
// row of the table below per N in use; the sums are operands of the instruction, so each N has a list of them. Beside
// wgmma.cuh, whose descriptors and ordering these use. No policy.
//
// The sum of column 8 j + 2 (lane % 4) + c, row 16 warp + lane / 4 + 8 r is d[4 j + 2 r + c]. Packed in pairs these are
// operands a of k step j / 2 in registers: a[0] row lane / 4, columns 2 (lane % 4) and the next; a[1] row + 8; a[2] and
// a[3] the same rows, columns + 8.
#pragma once

#include "ptx/wgmma.cuh"

namespace folio {

// How an operand lies in shared memory: its depth is contiguous (queries and keys of a score), or its rows or columns
// are (values, as they lie in the cache).
enum class Major { DEPTH = 0, WIDTH = 1 };

// The names of the first so many sums in the text of the instruction.
#define FOLIO_WGMMA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FOLIO_WGMMA_D16 FOLIO_WGMMA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FOLIO_WGMMA_D24 FOLIO_WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FOLIO_WGMMA_D32 FOLIO_WGMMA_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FOLIO_WGMMA_D40 FOLIO_WGMMA_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FOLIO_WGMMA_D48 FOLIO_WGMMA_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FOLIO_WGMMA_D56 FOLIO_WGMMA_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FOLIO_WGMMA_D64 FOLIO_WGMMA_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FOLIO_WGMMA_D72 FOLIO_WGMMA_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FOLIO_WGMMA_D80 FOLIO_WGMMA_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FOLIO_WGMMA_D96 \
    FOLIO_WGMMA_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FOLIO_WGMMA_D112 \
    FOLIO_WGMMA_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define FOLIO_WGMMA_D128                                                                           \
    FOLIO_WGMMA_D112                                                                               \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
    "%127"

// The sums as operands.
#define FOLIO_WGMMA_SUMS(i)                                                                                     \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define FOLIO_WGMMA_SUMS_8 FOLIO_WGMMA_SUMS(0)
#define FOLIO_WGMMA_SUMS_16 FOLIO_WGMMA_SUMS(0), FOLIO_WGMMA_SUMS(8)
#define FOLIO_WGMMA_SUMS_24 FOLIO_WGMMA_SUMS_16, FOLIO_WGMMA_SUMS(16)
#define FOLIO_WGMMA_SUMS_32 FOLIO_WGMMA_SUMS(0), FOLIO_WGMMA_SUMS(8), FOLIO_WGMMA_SUMS(16), FOLIO_WGMMA_SUMS(24)
#define FOLIO_WGMMA_SUMS_40 \
    FOLIO_WGMMA_SUMS(0), FOLIO_WGMMA_SUMS(8), FOLIO_WGMMA_SUMS(16), FOLIO_WGMMA_SUMS(24), FOLIO_WGMMA_SUMS(32)
#define FOLIO_WGMMA_SUMS_48 FOLIO_WGMMA_SUMS_40, FOLIO_WGMMA_SUMS(40)
#define FOLIO_WGMMA_SUMS_56 FOLIO_WGMMA_SUMS_48, FOLIO_WGMMA_SUMS(48)
#define FOLIO_WGMMA_SUMS_64 FOLIO_WGMMA_SUMS_56, FOLIO_WGMMA_SUMS(56)
#define FOLIO_WGMMA_SUMS_72 FOLIO_WGMMA_SUMS_64, FOLIO_WGMMA_SUMS(64)
#define FOLIO_WGMMA_SUMS_80 FOLIO_WGMMA_SUMS_72, FOLIO_WGMMA_SUMS(72)
#define FOLIO_WGMMA_SUMS_96 FOLIO_WGMMA_SUMS_80, FOLIO_WGMMA_SUMS(80), FOLIO_WGMMA_SUMS(88)
#define FOLIO_WGMMA_SUMS_112 FOLIO_WGMMA_SUMS_96, FOLIO_WGMMA_SUMS(96), FOLIO_WGMMA_SUMS(104)
#define FOLIO_WGMMA_SUMS_128 FOLIO_WGMMA_SUMS_112, FOLIO_WGMMA_SUMS(112), FOLIO_WGMMA_SUMS(120)

#define FOLIO_WGMMA_TEXT(N, D, TYPE, PREDICATE, OPERANDS)             \
    "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #PREDICATE \
    ", 0;\n"                                                          \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FOLIO_WGMMA_D##D "}, " OPERANDS ";\n}"

// Both operands in shared memory.
#define FOLIO_WGMMA_SS(TYPE, N, D, A, B, PREDICATE, A_MAJOR, B_MAJOR)                                            \
    asm volatile(                                                                                                \
        FOLIO_WGMMA_TEXT(N, D, TYPE, PREDICATE, "%" #A ", %" #B ", accumulate, 1, 1, %" #A_MAJOR ", %" #B_MAJOR) \
        : FOLIO_WGMMA_SUMS_##D                                                                                   \
        : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(A_LAYOUT)), "n"(static_cast<int>(B_LAYOUT)))

// a in registers.
#define FOLIO_WGMMA_RS(TYPE, N, D, A0, A1, A2, A3, B, PREDICATE, B_MAJOR)                                            \
    asm volatile(FOLIO_WGMMA_TEXT(N, D, TYPE, PREDICATE,                                                             \
                                  "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", accumulate, 1, 1, %" #B_MAJOR) \
                 : FOLIO_WGMMA_SUMS_##D                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                              \
                   "n"(static_cast<int>(B_LAYOUT)))

// N columns, D = N / 2 sums, and the six numbers behind D: those of the operands behind the sums.
#define FOLIO_WGMMA(N, D, D1, D2, D3, D4, D5, D6)                                                 \
    template <class T, Major A_LAYOUT = Major::DEPTH, Major B_LAYOUT = Major::DEPTH>              \
    __device__ __forceinline__ void wgmma_ss(float(&d)[D], u64 a, u64 b, int accumulate) {        \
        if constexpr (T::IS_BF16) {                                                               \
            FOLIO_WGMMA_SS("bf16", N, D, D, D1, D2, D3, D4);                                      \
        } else {                                                                                  \
            FOLIO_WGMMA_SS("f16", N, D, D, D1, D2, D3, D4);                                       \
        }                                                                                         \
    }                                                                                             \
    template <class T, Major B_LAYOUT = Major::DEPTH>                                             \
    __device__ __forceinline__ void wgmma_rs(float(&d)[D], const u32 *a, u64 b, int accumulate) { \
        if constexpr (T::IS_BF16) {                                                               \
            FOLIO_WGMMA_RS("bf16", N, D, D, D1, D2, D3, D4, D5, D6);                              \
        } else {                                                                                  \
            FOLIO_WGMMA_RS("f16", N, D, D, D1, D2, D3, D4, D5, D6);                               \
        }                                                                                         \
    }

FOLIO_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
FOLIO_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
FOLIO_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
FOLIO_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
FOLIO_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
FOLIO_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
FOLIO_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
FOLIO_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
FOLIO_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
FOLIO_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
FOLIO_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
FOLIO_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
FOLIO_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)

}  // namespace folio
