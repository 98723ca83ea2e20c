// Lists of requests, one behind another: where each begins, and whose an element is. Every block sums up the counts of the
// whole batch for itself, so blocks need not wait for each other and there is no memory between them. A launch pays for
// that with its blocks times the batch; so blocks are as many as run at once, and not some for each request.
#pragma once
#include "core/integers.cuh"

namespace folio {

// Neighbouring requests belong to one thread, whose elements begin at `of_threads[thread]`.
struct Starts {
    const i64 *of_threads;
    u32 batch_size, requests_of_thread;

    // count(b) is how many elements a request has.
    template <class Count>
    __device__ __forceinline__ Starts(u32 batch_size, const Count &count)
        : batch_size(batch_size), requests_of_thread((batch_size + FOLIO_THREADS - 1) / FOLIO_THREADS) {
        static_assert((FOLIO_THREADS & (FOLIO_THREADS - 1)) == 0, "searches halve a power of two");
        __shared__ i64 starts[FOLIO_THREADS + 1];
        of_threads = starts;
        i64 own = 0;
        for (u32 b = first_request(threadIdx.x); b < first_request(threadIdx.x + 1); b++) own += count(b);
        const BlockSums sums(own);
        starts[threadIdx.x] = sums.before;
        if (threadIdx.x == 0) starts[FOLIO_THREADS] = sums.all;
        __syncthreads();
    }

    __device__ __forceinline__ u32 first_request(u32 thread) const {
        return min(thread * requests_of_thread, batch_size);
    }

    // The elements of all requests.
    __device__ __forceinline__ i64 total() const { return of_threads[FOLIO_THREADS]; }

    // Calls f(b, begin, end) for every request, in one of so many blocks each.
    template <class Count, class F>
    __device__ __forceinline__ void each(u32 block, u32 blocks, const Count &count, const F &f) const {
        if (threadIdx.x / LANES % blocks != block) return;
        i64 begin = of_threads[threadIdx.x];
        for (u32 b = first_request(threadIdx.x); b < first_request(threadIdx.x + 1); b++) {
            const i64 end = begin + count(b);
            f(b, begin, end);
            begin = end;
        }
    }

    // The request of an element below total(), and where its elements begin.
    template <class Count>
    __device__ __forceinline__ u32 find(i64 element, i64 &begin, const Count &count) const {
        u32 thread = 0;
#pragma unroll
        for (u32 step = FOLIO_THREADS / 2; step > 0; step /= 2) {
            if (of_threads[thread + step] <= element) thread += step;
        }
        begin = of_threads[thread];
        u32 b = first_request(thread);
        for (const u32 last = first_request(thread + 1) - 1; b < last; b++) {
            const i64 end = begin + count(b);
            if (element < end) break;
            begin = end;
        }
        return b;
    }
};

// Ids of a list in rising order, of which two spans are at hand: a quad (quads.cuh) seldom meets more. spans.at(element) is
// the span that has it, from its `begin` to its `end`, and spans.id(span, element) an id of it, as the list holds it.
template <class Spans, class Span>
struct SpannedIds {
    Spans spans;
    Span near = {}, far = {};

    __device__ __forceinline__ i64 reach(i64 from, i64 to) {
        if (from >= near.end) near = from >= far.begin && from < far.end ? far : spans.at(from);
        if (to <= near.end) return to;
        far = spans.at(near.end);
        return min(to, far.end);
    }

    __device__ __forceinline__ i64 operator[](i64 element) const {
        Span span = far;
        if (element < near.end) span = near;
        return spans.id(span, element);
    }
};

}  // namespace folio
