// Tokens that are gathered from a paged cache row by row: where the token of a row is. Lengths and page ids are the
// device's, and unchecked. Also whether two element types are one, so that nothing has to be converted.
#pragma once
#include "core/integer_table.cuh"
#include "core/paged.cuh"
#include "core/requests.cuh"

namespace folio {

template <class A, class B>
constexpr bool ARE_ONE = false;
template <class A>
constexpr bool ARE_ONE<A, A> = true;

template <class Params>
__device__ __forceinline__ i64 first_row_of(const Params &p, i64 request) {
    return get(p.cu_seq_lens, 0, request);
}

// Where the token of a row is, which belongs to this request if to any; false where there is none.
template <class Params>
__device__ __forceinline__ bool find_token_of(const Params &p, u32 request, i64 row, i64 &page, u32 &token_in_page) {
    const i64 first = first_row_of(p, request);
    if (row < first || row >= first_row_of(p, request + 1)) return false;
    // Sums are unsigned: a number that is no length wraps to one that is too large.
    u64 token = static_cast<u64>(row) - first;
    if (p.seq_starts.data) token += get(p.seq_starts, 0, request);
    if (token >= 1ull << 31) return false;
    const u32 page_of_request = divide(static_cast<u32>(token), p.page_size);
    const bool is_list = p.page_indptr.data;
    u64 column = page_of_request;
    if (is_list) column += get(p.page_indptr, 0, request);
    if (column >= static_cast<u64>(p.page_ids.columns)) return false;
    page = get(p.page_ids, is_list ? 0 : request, column);
    token_in_page = static_cast<u32>(token) - page_of_request * p.page_size.divisor;
    return static_cast<u64>(page) < p.num_pages;
}

// Where the token of a row is; false where there is none. Params is that of a kernel that gathers.
template <class Params>
__device__ __forceinline__ bool find_token(const Params &p, i64 row, i64 &page, u32 &token_in_page) {
    const auto first_row = [&](i64 request) { return first_row_of(p, request); };
    return find_token_of(p, request_of_row(first_row, p.batch_size, row), row, page, token_in_page);
}

}  // namespace folio
