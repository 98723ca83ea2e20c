// Tokens that are gathered from a paged cache row by row: where the token of a row is. Lengths and page ids are the
// device's, and unchecked. Also whether two element types are one, so that nothing has to be converted.
#pragma once
#include "core/paged.cuh"
#include "core/requests.cuh"

namespace folio {

template <class A, class B>
constexpr bool ARE_ONE = false;
template <class A>
constexpr bool ARE_ONE<A, A> = true;

// Where the token of a row is; false where there is none. Params is that of a kernel that gathers.
template <class Params>
__device__ __forceinline__ bool find_token(const Params &p, i64 row, i64 &page, u32 &token_in_page) {
    const u32 request = request_of_row(p.cu_seq_lens, p.batch_size, row);
    const i64 in_request = row - p.cu_seq_lens[request];
    if (in_request < 0 || row >= p.cu_seq_lens[request + 1]) return false;
    const i64 token = in_request + (p.seq_starts ? p.seq_starts[request] : 0);
    if (token < 0 || token >= 1ll << 31) return false;
    const u32 column = divide(static_cast<u32>(token), p.page_size);
    i64 at;
    if (p.page_indptr) {
        at = static_cast<i64>(p.page_indptr[request]) + column;
        if (at < 0 || at >= p.num_page_ids) return false;
    } else {
        if (column >= p.num_page_ids) return false;
        at = request * p.table_stride + column;
    }
    const i32 id = p.page_ids[at];
    page = id;
    token_in_page = static_cast<u32>(token) - column * p.page_size.divisor;
    return static_cast<u32>(id) < p.num_pages;
}

}  // namespace folio
