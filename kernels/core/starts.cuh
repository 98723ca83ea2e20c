// Lists of requests, one behind another: where each begins. Every block sums up the counts of the whole batch for itself, so
// blocks need not wait for each other and there is no memory between them. A launch pays for that with its blocks times the
// batch; so blocks are as many as run at once, and not some for each request.
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
#pragma unroll 1
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

    // A request that has an element below total(), or one shortly before that; and where its elements begin.
    __device__ __forceinline__ u32 at_or_before(i64 element, i64 &begin) const {
        u32 thread = 0;
#pragma unroll 1
        for (u32 step = FOLIO_THREADS / 2; step > 0; step /= 2) {
            if (of_threads[thread + step] <= element) thread += step;
        }
        begin = of_threads[thread];
        return first_request(thread);
    }
};

}  // namespace folio
