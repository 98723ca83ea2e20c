// folio.hpp: handles move and end themselves, failures carry status and sentence, tensors keep their shape
// when copied, and the same code serves a linked and a loaded library.
#include "expect.h"
#include <folio/folio.hpp>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

static_assert(!std::is_copy_constructible_v<folio::Context> && std::is_nothrow_move_constructible_v<folio::Context>);
static_assert(!std::is_copy_constructible_v<folio::Decode> && std::is_nothrow_move_constructible_v<folio::Decode>);
static_assert(!std::is_copy_constructible_v<folio::Prefill> && std::is_nothrow_move_assignable_v<folio::Prefill>);
static_assert(!std::is_convertible_v<folio::Tensor &&, const folio_tensor *>);
static_assert(std::is_convertible_v<folio::Tensor &, const folio_tensor *>);

namespace {

constexpr unsigned char poison = 0xa5;

}  // namespace

// Memory of this program starts out poisoned.
void *operator new[](size_t bytes)
{
    void *memory = std::malloc(bytes != 0 ? bytes : 1);
    if (!memory)
        throw std::bad_alloc();
    return std::memset(memory, poison, bytes);
}

void operator delete[](void *memory) noexcept { std::free(memory); }
void operator delete[](void *memory, size_t) noexcept { std::free(memory); }

namespace {

constexpr int64_t heads = 2, dim = 8, keys = 5;

folio_decode_desc decode_desc()
{
    auto desc = FOLIO_INIT(folio_decode_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.num_qo_heads = desc.num_kv_heads = heads;
    desc.head_dim_qk = dim;
    desc.page_size = 1;
    desc.max_batch_size = 1;
    desc.max_kv_len = 16;
    return desc;
}

// Zero keys: o is the mean of the values, lse the logarithm of their number.
void decode_by(const folio_api &api)
{
    folio::Context context = folio::Context::cpu(2, api);
    folio::Decode made(context, decode_desc());
    folio::Decode decode = std::move(made);
    EXPECT(made.get() == nullptr && decode.get() != nullptr && decode.kernel() != nullptr);
    folio::HostWorkspace workspace(decode.workspace());

    const std::vector<int32_t> indptr{0, keys}, slots{4, 2, 0, 1, 3}, lengths{keys};
    folio::Tensor kv_indptr(indptr), kv_indices(slots), kv_len(lengths);
    auto batch = FOLIO_INIT(folio_batch);
    batch.kv_indptr = kv_indptr;
    batch.kv_indices = kv_indices;
    batch.kv_len = kv_len;
    decode.plan(batch, workspace);

    std::vector<float> q_data(heads * dim, 1.0f), k_data(keys * heads * dim, 0.0f), v_data(keys * heads * dim);
    for (size_t i = 0; i < v_data.size(); i++)
        v_data[i] = static_cast<float>(i);
    std::vector<float> o_data(heads * dim), lse_data(heads);
    folio::Tensor q(q_data.data(), FOLIO_FLOAT32, {1, heads, dim});
    folio::Tensor k(k_data.data(), FOLIO_FLOAT32, {keys, heads, dim});
    folio::Tensor v(v_data.data(), FOLIO_FLOAT32, {keys, heads, dim}, {heads * dim, dim, 1});
    folio::Tensor o(o_data.data(), FOLIO_FLOAT32, {1, heads, dim});
    folio::Tensor lse(lse_data.data(), FOLIO_FLOAT32, {1, heads});
    auto args = FOLIO_INIT(folio_attention_args);
    args.q = q;
    args.k = k;
    args.v = v;
    args.o = o;
    args.lse = lse;
    decode.run(args);
    for (size_t i = 0; i < o_data.size(); i++)
        EXPECT(std::fabs(o_data[i] - (static_cast<float>(i) + 32.0f)) < 1e-4f);
    EXPECT(std::fabs(lse_data[1] - std::log(static_cast<float>(keys))) < 1e-5f);
}

// Zero queries: o is the mean of the latent rows.
void mla_by(const folio_api &api)
{
    constexpr int64_t rank = 16, rope = 8;
    folio::Context context = folio::Context::cpu(2, api);
    auto desc = FOLIO_INIT(folio_mla_desc);
    desc.q_dtype = FOLIO_FLOAT32;
    desc.num_heads = heads;
    desc.kv_lora_rank = rank;
    desc.qk_rope_head_dim = rope;
    desc.page_size = keys;
    desc.max_batch_size = 1;
    desc.max_kv_len = keys;
    folio::Mla mla(context, desc);
    folio::HostWorkspace workspace(mla.workspace());

    const std::vector<int32_t> lengths{keys}, pages{0};
    folio::Tensor kv_len(lengths), block_table(pages.data(), FOLIO_INT32, {1, 1});
    auto batch = FOLIO_INIT(folio_batch);
    batch.kv_len = kv_len;
    batch.block_table = block_table;
    mla.plan(batch, workspace);

    std::vector<float> q_data(heads * (rank + rope), 0.0f), kv_data(keys * (rank + rope)), o_data(heads * rank);
    for (size_t i = 0; i < kv_data.size(); i++)
        kv_data[i] = static_cast<float>(i);
    folio::Tensor q_latent(q_data.data(), FOLIO_FLOAT32, {1, heads, rank}, {heads * (rank + rope), rank + rope, 1});
    folio::Tensor q_rope(q_data.data() + rank, FOLIO_FLOAT32, {1, heads, rope}, {heads * (rank + rope), rank + rope, 1});
    folio::Tensor kv(kv_data.data(), FOLIO_FLOAT32, {1, keys, rank + rope});
    folio::Tensor o(o_data.data(), FOLIO_FLOAT32, {1, heads, rank});
    auto args = FOLIO_INIT(folio_mla_args);
    args.q_latent = q_latent;
    args.q_rope = q_rope;
    args.kv = kv;
    args.o = o;
    args.sm_scale = 0.125f;
    mla.run(args);
    for (size_t i = 0; i < o_data.size(); i++)
        EXPECT(std::fabs(o_data[i] - (static_cast<float>(i % rank) + 48.0f)) < 1e-4f);
}

// Functions without a context: a prefix that two requests share, and a figure.
void figures_by(const folio_api &api)
{
    const std::vector<int32_t> lengths{4, 4}, pages{7, 1, 7, 2};
    folio::Tensor kv_len(lengths), block_table(pages, {2, 2});
    auto batch = FOLIO_INIT(folio_batch);
    batch.kv_len = kv_len;
    batch.block_table = block_table;
    int32_t begin = -1, end = -1, shared = -1;
    uint32_t count = 0;
    auto args = FOLIO_INIT(folio_find_shared_prefixes_args);
    args.page_size = 2;
    args.capacity = 1;
    args.batch = &batch;
    args.request_begin = &begin;
    args.request_end = &end;
    args.kv_len = &shared;
    args.num_prefixes = &count;
    folio::find_shared_prefixes(args, api);
    EXPECT(count == 1 && begin == 0 && end == 2 && shared == 2);
    EXPECT(folio::mla_context_tokens(1000, 1, 16, api) == 8000);

    args.page_size = 0;
    try {
        folio::find_shared_prefixes(args, api);
        EXPECT(!"page_size 0 is refused");
    } catch (const folio::Error &error) {
        EXPECT(error.status() == FOLIO_ERR_INVALID_ARGUMENT && std::strstr(error.what(), "page_size"));
    }
}

// A workspace can be large and Folio asks for no zeros: what the allocator gave stays as it was.
void workspaces_are_not_filled()
{
    auto info = FOLIO_INIT(folio_workspace_info);
    info.host_bytes = 4096;
    info.alignment = 64;
    folio::HostWorkspace made(info);
    folio::HostWorkspace workspace = std::move(made);
    const folio_workspace &memory = workspace;
    const auto *bytes = static_cast<const unsigned char *>(memory.host);
    EXPECT(memory.host_bytes == 4096 && reinterpret_cast<uintptr_t>(bytes) % 64 == 0);
    for (size_t i = 0; i < 4096; i++)
        EXPECT(bytes[i] == poison);
}

void failures_are_exceptions()
{
    folio::Context context = folio::Context::cpu(0);
    auto desc = decode_desc();
    desc.head_dim_qk = 7;
    try {
        folio::Decode decode(context, desc);
        EXPECT(!"head_dim 7 is refused");
    } catch (const folio::Error &error) {
        EXPECT(error.status() == FOLIO_ERR_UNSUPPORTED);
        EXPECT(std::string(error.what()).find("head_dim_qk: 7") != std::string::npos);
    }
    try {
        folio::load("/nonexistent/libfolio.so.0");
        EXPECT(!"a missing library is refused");
    } catch (const folio::Error &error) {
        EXPECT(std::string(error.what()).find("/nonexistent") != std::string::npos);
    }
}

void tensors_keep_their_shape()
{
    float memory[6] = {};
    folio::Tensor strided(memory, FOLIO_FLOAT32, {2, 2}, {3, 1});
    std::vector<folio::Tensor> copies(3, strided);
    strided = folio::Tensor(memory, FOLIO_FLOAT32, {6});
    const folio_tensor *copy = copies[2], *compact = strided;
    EXPECT(copy->ndim == 2 && copy->shape[1] == 2 && copy->strides[0] == 3 && copy->data == memory);
    EXPECT(compact->ndim == 1 && compact->shape[0] == 6 && compact->strides == nullptr);
}

}  // namespace

int main()
{
    decode_by(folio::linked());
    decode_by(folio::load(FOLIO_PLUGIN));
    mla_by(folio::linked());
    figures_by(folio::linked());
    figures_by(folio::load(FOLIO_PLUGIN));
    workspaces_are_not_filled();
    failures_are_exceptions();
    tensors_keep_their_shape();
    return 0;
}
