/**
 * @file folio.hpp
 * C++17 over folio.h: handles that destroy themselves, exceptions, tensors that own their shape.
 *
 * Header-only, and thin: structs are C's own, so folio.h remains the reference. It calls through the table
 * of functions, hence serves both hosts that link Folio and hosts that load it (see folio::load).
 *
 * Failures are exceptions (folio::Error), not expected-style results, because the C++ runtimes that this
 * header is for report errors that way: PyTorch's TORCH_CHECK, on which vLLM's and SGLang's ops are
 * built, TensorRT-LLM's TLLM_CHECK, Paddle's PADDLE_ENFORCE in FastDeploy. An exception never crosses the
 * C ABI: it is thrown here, in the host's own code, out of a status. A host that wants exceptions of its own
 * type, or none, defines FOLIO_THROW (folio_error.hpp). Tensors are in folio_tensor.hpp.
 */

#ifndef FOLIO_FOLIO_HPP
#define FOLIO_FOLIO_HPP

#include <dlfcn.h>
#include <folio/folio.h>
#include <folio/folio_error.hpp>
#include <folio/folio_tensor.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace folio {

namespace detail {

/** Receives the report of one call. Its message is not zeroed: Folio writes it on failure only. */
class Report {
public:
    Report() noexcept { error_.struct_size = sizeof error_; }

    folio_error *get() noexcept { return &error_; }

    void check(folio_status status) const
    {
        if (status != FOLIO_OK)
            fail(status, error_.message);
    }

private:
    folio_error error_;
};

inline const folio_api &fitting(const folio_api *api)
{
    if (!api)
        fail(FOLIO_ERR_UNSUPPORTED, "this library does not implement the ABI version of its caller's header");
    return *api;
}

}  // namespace detail

/** The functions of the library that this program is linked with. */
inline const folio_api &linked()
{
    return detail::fitting(folio_get_api(FOLIO_ABI_VERSION));
}

/** Loads libfolio.so from `path` and returns its functions. The library stays loaded for good. */
inline const folio_api &load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        detail::fail(FOLIO_ERR_UNSUPPORTED, dlerror());
    auto get_api = reinterpret_cast<decltype(&folio_get_api)>(dlsym(library, "folio_get_api"));
    return detail::fitting(get_api ? get_api(FOLIO_ABI_VERSION) : nullptr);
}

/** A device and what belongs to it. Handles made from it keep it alive. */
class Context {
public:
    /** Opens a device, of the library behind `api`. */
    explicit Context(const folio_context_desc &desc, const folio_api &api = linked()) : context_(nullptr, {&api})
    {
        detail::Report report;
        folio_context *context = nullptr;
        report.check(api.context_create(&desc, &context, report.get()));
        context_.reset(context);
    }

    /** The CPU; 1 thread: compute on the calling thread; 0: a thread for each CPU. */
    static Context cpu(uint32_t num_threads, const folio_api &api = linked())
    {
        auto desc = FOLIO_INIT(folio_context_desc);
        desc.device_type = FOLIO_DEVICE_CPU;
        desc.num_threads = num_threads;
        return Context(desc, api);
    }

    /** Writes new tokens to a paged cache. */
    void append(const folio_kv_append_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().kv_append(get(), &args, stream, report.get()));
    }

    /** Merges two attention states. */
    void merge(const folio_merge_state_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().merge_state(get(), &args, stream, report.get()));
    }

    /** Merges n attention states per row. */
    void merge(const folio_merge_states_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().merge_states(get(), &args, stream, report.get()));
    }

    /** Merges as many attention states per token as each has. */
    void merge(const folio_merge_varlen_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().merge_varlen(get(), &args, stream, report.get()));
    }

    /** Cuts the up-projection of MLA into W_UK and W_UV. */
    void absorb_weights(const folio_mla_absorb_weights_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_absorb_weights(get(), &args, stream, report.get()));
    }

    /** Takes queries of MLA to the latent space. */
    void absorb_q(const folio_mla_absorb_q_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_absorb_q(get(), &args, stream, report.get()));
    }

    /** Takes latent outputs of MLA to the values' space. */
    void project_o(const folio_mla_project_o_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_project_o(get(), &args, stream, report.get()));
    }

    /** Takes latent rows of MLA to keys and values. */
    void up_project(const folio_mla_up_project_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_up_project(get(), &args, stream, report.get()));
    }

    /** Copies pages of a cache. */
    void copy(const folio_kv_copy_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().kv_copy(get(), &args, stream, report.get()));
    }

    /** Copies tokens of a paged cache to dense rows. */
    void gather(const folio_kv_gather_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().kv_gather(get(), &args, stream, report.get()));
    }

    /** Writes new tokens to a cache of latent records. */
    void append(const folio_mla_append_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_append(get(), &args, stream, report.get()));
    }

    /** Normalises and rotates queries and keys of new tokens, and writes keys and values to a paged cache. */
    void append(const folio_rope_append_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().rope_append(get(), &args, stream, report.get()));
    }

    /** Copies latent records to dense rows. */
    void gather(const folio_mla_gather_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_gather(get(), &args, stream, report.get()));
    }

    /** Puts records that were gathered rank by rank request by request. */
    void reorder(const folio_cp_reorder_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().cp_reorder(get(), &args, stream, report.get()));
    }

    /** Scales one rank's output by its share of the softmax over all ranks' keys. */
    void correct(const folio_cp_correct_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().cp_correct(get(), &args, stream, report.get()));
    }

    /** Makes masks, positions and links of trees of draft tokens. */
    void tree_mask(const folio_tree_mask_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().tree_mask(get(), &args, stream, report.get()));
    }

    /** Computes cumulative lengths and what else follows from the lengths of a step. */
    void batch_lengths(const folio_batch_lengths_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().batch_lengths(get(), &args, stream, report.get()));
    }

    /** Lists the pages or slots of every request's tokens. */
    void kv_indices(const folio_kv_indices_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().kv_indices(get(), &args, stream, report.get()));
    }

    /** Makes a block table of a list. */
    void block_table(const folio_block_table_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().block_table(get(), &args, stream, report.get()));
    }

    /** Finds the slots and positions of new tokens. */
    void slot_mapping(const folio_slot_mapping_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().slot_mapping(get(), &args, stream, report.get()));
    }

    /** Lists the slots of every branch of a draft for each of its steps. */
    void draft_kv_indices(const folio_draft_kv_indices_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().draft_kv_indices(get(), &args, stream, report.get()));
    }

    /** The functions that this context was made by. */
    const folio_api &api() const noexcept { return *context_.get_deleter().api; }
    /** For calls of folio.h. */
    const folio_context *get() const noexcept { return context_.get(); }

private:
    struct Destroy {
        const folio_api *api;
        void operator()(folio_context *context) const noexcept { api->context_destroy(context); }
    };
    std::unique_ptr<folio_context, Destroy> context_;
};

namespace detail {

/** A function that needs no context and reports failures. */
template <class Args>
void compute(const folio_api &api, folio_status (*folio_api::*slot)(const Args *, folio_error *), const Args &args)
{
    Report report;
    report.check((api.*slot)(&args, report.get()));
}

}  // namespace detail

/** Lists what neighbouring requests share, from a page table on the host. */
inline void find_shared_prefixes(const folio_find_shared_prefixes_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::find_shared_prefixes, args);
}

/** Says how many tokens ranks of context parallelism hold of sequences. */
inline void cp_local_lengths(const folio_cp_local_lengths_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::cp_local_lengths, args);
}

/** Cuts contexts into chunks that fit a workspace. */
inline void mla_context_chunks(const folio_mla_context_chunks_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::mla_context_chunks, args);
}

/** Plans FlashMLA's dense decode kernel, for hosts that drive it. */
inline void flashmla_metadata(const folio_flashmla_metadata_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::flashmla_metadata, args);
}

/** Splits of decode requests as FastDeploy's Triton MLA backend makes them. */
inline void num_kv_splits(const folio_num_kv_splits_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::num_kv_splits, args);
}

/** Says where the prefills of a batch begin. */
inline void split_decodes_and_prefills(const folio_split_decodes_and_prefills_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::split_decodes_and_prefills, args);
}

/** Splits of decode requests as SGLang's Triton backend makes them. */
inline void balanced_kv_splits(const folio_balanced_kv_splits_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::balanced_kv_splits, args);
}

/** Whether vLLM's FlashAttention backend would attend a common prefix once. */
inline void use_cascade(const folio_use_cascade_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::use_cascade, args);
}

/** Puts a batch into the order that vLLM's backends want. */
inline void reorder_batch(const folio_reorder_batch_args &args, const folio_api &api = linked())
{
    detail::compute(api, &folio_api::reorder_batch, args);
}

/** Tokens of vLLM's workspace for chunks of cached contexts. */
inline uint64_t mla_context_tokens(uint32_t max_model_len, uint32_t max_num_seqs, uint32_t page_size,
                                   const folio_api &api = linked())
{
    return api.mla_context_tokens(max_model_len, max_num_seqs, page_size);
}

namespace detail {

/** Types and slots of a decode handle. */
struct DecodeSlots {
    using Handle = folio_decode;
    using Desc = folio_decode_desc;
    using Args = folio_attention_args;
    static constexpr auto create = &folio_api::decode_create;
    static constexpr auto workspace = &folio_api::decode_workspace;
    static constexpr auto plan = &folio_api::decode_plan;
    static constexpr auto run = &folio_api::decode_run;
    static constexpr auto kernel = &folio_api::decode_kernel;
    static constexpr auto destroy = &folio_api::decode_destroy;
};

/** Types and slots of a prefill handle. */
struct PrefillSlots {
    using Handle = folio_prefill;
    using Desc = folio_prefill_desc;
    using Args = folio_attention_args;
    static constexpr auto create = &folio_api::prefill_create;
    static constexpr auto workspace = &folio_api::prefill_workspace;
    static constexpr auto plan = &folio_api::prefill_plan;
    static constexpr auto run = &folio_api::prefill_run;
    static constexpr auto kernel = &folio_api::prefill_kernel;
    static constexpr auto destroy = &folio_api::prefill_destroy;
};

/** Types and slots of an MLA handle. */
struct MlaSlots {
    using Handle = folio_mla;
    using Desc = folio_mla_desc;
    using Args = folio_mla_args;
    static constexpr auto create = &folio_api::mla_create;
    static constexpr auto workspace = &folio_api::mla_workspace;
    static constexpr auto plan = &folio_api::mla_plan;
    static constexpr auto run = &folio_api::mla_run;
    static constexpr auto kernel = &folio_api::mla_kernel;
    static constexpr auto destroy = &folio_api::mla_destroy;
};

}  // namespace detail

/**
 * An attention handle: plan once per step, run once per layer. Move-only.
 *
 * Threads: const member functions may run concurrently; plan and the destructor need the handle alone.
 */
template <class Slots>
class Attention {
public:
    /** folio_decode, folio_prefill or folio_mla. */
    using Handle = typename Slots::Handle;

    /** Picks the code. Error with FOLIO_ERR_UNSUPPORTED where this library has none for `desc`. */
    Attention(const Context &context, const typename Slots::Desc &desc) : handle_(nullptr, {&context.api()})
    {
        detail::Report report;
        Handle *handle = nullptr;
        report.check((context.api().*Slots::create)(context.get(), &desc, &handle, report.get()));
        handle_.reset(handle);
    }

    /** Memory that every plan within the desc can do with. */
    folio_workspace_info workspace() const
    {
        detail::Report report;
        auto info = FOLIO_INIT(folio_workspace_info);
        report.check((api().*Slots::workspace)(get(), &info, report.get()));
        return info;
    }

    /** Takes over a step's batch. On failure the previous plan stays in force. */
    void plan(const folio_batch &batch, const folio_workspace &workspace, void *stream = nullptr)
    {
        detail::Report report;
        report.check((api().*Slots::plan)(handle_.get(), &batch, &workspace, stream, report.get()));
    }

    /** Computes one layer. */
    void run(const typename Slots::Args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check((api().*Slots::run)(get(), &args, stream, report.get()));
    }

    /** Decode: appends new tokens, and computes one layer with them. */
    void run(const folio_rope_append_args &append, const typename Slots::Args &args, void *stream = nullptr) const
    {
        static_assert(std::is_same<Handle, folio_decode>::value, "of decode handles alone");
        detail::Report report;
        report.check(api().decode_append_run(get(), &append, &args, stream, report.get()));
    }

    /** Name of the kernel that was picked. */
    const char *kernel() const noexcept { return (api().*Slots::kernel)(get()); }

    /** For calls of folio.h. */
    const Handle *get() const noexcept { return handle_.get(); }

private:
    struct Destroy {
        const folio_api *api;
        void operator()(Handle *handle) const noexcept { (api->*Slots::destroy)(handle); }
    };

    const folio_api &api() const noexcept { return *handle_.get_deleter().api; }

    std::unique_ptr<Handle, Destroy> handle_;
};

/** A few query rows per request over a paged cache. */
using Decode = Attention<detail::DecodeSlots>;
/** Any number of query rows per request, over paged or ragged keys and values. */
using Prefill = Attention<detail::PrefillSlots>;
/** Absorbed multi-head latent attention over a paged cache of latent records. */
using Mla = Attention<detail::MlaSlots>;

/**
 * MLA over a cached context: plan once per step, run once per layer, or take the steps of a run. Move-only.
 *
 * Threads: plan and the destructor need the handle alone; runs of one plan share its workspace.
 */
class MlaContext {
public:
    /** Picks the code. Error with FOLIO_ERR_UNSUPPORTED where this library has none for `desc`. */
    MlaContext(const Context &context, const folio_mla_context_desc &desc) : handle_(nullptr, {&context.api()})
    {
        detail::Report report;
        folio_mla_context *handle = nullptr;
        report.check(api().mla_context_create(context.get(), &desc, &handle, report.get()));
        handle_.reset(handle);
    }

    /** Memory that every plan within the desc can do with. */
    folio_workspace_info workspace() const
    {
        detail::Report report;
        auto info = FOLIO_INIT(folio_workspace_info);
        report.check(api().mla_context_workspace(get(), &info, report.get()));
        return info;
    }

    /** Takes over a step's batch. On failure the previous plan stays in force. */
    void plan(const folio_batch &batch, const folio_workspace &workspace, void *stream = nullptr)
    {
        detail::Report report;
        report.check(api().mla_context_plan(handle_.get(), &batch, &workspace, stream, report.get()));
    }

    /** Computes one layer. */
    void run(const folio_mla_context_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_context_run(get(), &args, stream, report.get()));
    }

    /** The number of chunks of the current plan. */
    uint32_t num_chunks() const
    {
        detail::Report report;
        uint32_t count = 0;
        report.check(api().mla_context_num_chunks(get(), &count, report.get()));
        return count;
    }

    /** Context tokens of a chunk. */
    uint32_t chunk_tokens(uint32_t chunk) const
    {
        detail::Report report;
        uint32_t count = 0;
        report.check(api().mla_context_chunk_tokens(get(), chunk, &count, report.get()));
        return count;
    }

    /** The first step: new tokens over themselves. */
    void new_tokens(const folio_mla_context_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_context_new_tokens(get(), &args, stream, report.get()));
    }

    /** Copies a chunk's records to the caller's rows. */
    void gather(uint32_t chunk, const folio_mla_context_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_context_gather(get(), chunk, &args, stream, report.get()));
    }

    /** Attends a chunk that the caller has unpacked. */
    void attend(uint32_t chunk, const folio_mla_context_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().mla_context_attend(get(), chunk, &args, stream, report.get()));
    }

    /** Name of the kernel for new tokens. */
    const char *kernel() const noexcept { return api().mla_context_kernel(get()); }

    /** For calls of folio.h. */
    const folio_mla_context *get() const noexcept { return handle_.get(); }

private:
    struct Destroy {
        const folio_api *api;
        void operator()(folio_mla_context *handle) const noexcept { api->mla_context_destroy(handle); }
    };

    const folio_api &api() const noexcept { return *handle_.get_deleter().api; }

    std::unique_ptr<folio_mla_context, Destroy> handle_;
};

/**
 * A cascade handle (folio_cascade): batches whose requests share prefixes.
 *
 * Threads: plan and the destructor need the handle alone; runs of one plan share its workspace.
 */
class Cascade {
public:
    /** Picks the code. Error with FOLIO_ERR_UNSUPPORTED where this library has none for `desc`. */
    Cascade(const Context &context, const folio_cascade_desc &desc) : handle_(nullptr, {&context.api()})
    {
        detail::Report report;
        folio_cascade *handle = nullptr;
        report.check(api().cascade_create(context.get(), &desc, &handle, report.get()));
        handle_.reset(handle);
    }

    /** Memory that every plan within the desc can do with. */
    folio_workspace_info workspace() const
    {
        detail::Report report;
        auto info = FOLIO_INIT(folio_workspace_info);
        report.check(api().cascade_workspace(get(), &info, report.get()));
        return info;
    }

    /** Takes over a step's batch and what its requests share. */
    void plan(const folio_batch &batch, const folio_shared_prefixes &prefixes, const folio_workspace &workspace,
              void *stream = nullptr)
    {
        detail::Report report;
        report.check(api().cascade_plan(handle_.get(), &batch, &prefixes, &workspace, stream, report.get()));
    }

    /** Computes one layer. */
    void run(const folio_attention_args &args, void *stream = nullptr) const
    {
        detail::Report report;
        report.check(api().cascade_run(get(), &args, stream, report.get()));
    }

    /** Whether the current plan shares keys. */
    bool shares() const
    {
        detail::Report report;
        uint32_t shares = 0;
        report.check(api().cascade_shares(get(), &shares, report.get()));
        return shares != 0;
    }

    /** Name of the kernel for shared keys. */
    const char *kernel() const noexcept { return api().cascade_kernel(get()); }

    /** For calls of folio.h. */
    const folio_cascade *get() const noexcept { return handle_.get(); }

private:
    struct Destroy {
        const folio_api *api;
        void operator()(folio_cascade *handle) const noexcept { api->cascade_destroy(handle); }
    };

    const folio_api &api() const noexcept { return *handle_.get_deleter().api; }

    std::unique_ptr<folio_cascade, Destroy> handle_;
};

/** A handle's workspace in host memory, which is all that a CPU handle asks for. */
class HostWorkspace {
public:
    /** As much as `info` asks for. It is not written to: pages that no plan uses cost nothing. */
    explicit HostWorkspace(const folio_workspace_info &info)
        : memory_(new unsigned char[static_cast<size_t>(info.host_bytes + info.alignment)])
    {
        if (info.device_bytes != 0)
            detail::fail(FOLIO_ERR_WORKSPACE_TOO_SMALL, "HostWorkspace: this handle needs device memory too");
        void *start = memory_.get();
        auto space = static_cast<size_t>(info.host_bytes + info.alignment);
        workspace_.host = std::align(static_cast<size_t>(info.alignment), static_cast<size_t>(info.host_bytes), start, space);
        workspace_.host_bytes = info.host_bytes;
    }

    HostWorkspace(HostWorkspace &&) noexcept = default; /**< The memory stays where it is. */
    /** As moving. */
    HostWorkspace &operator=(HostWorkspace &&) noexcept = default;

    /** For plan. */
    operator const folio_workspace &() const noexcept { return workspace_; }

private:
    std::unique_ptr<unsigned char[]> memory_; /* not a vector, which would write zeros to all of it */
    folio_workspace workspace_ = FOLIO_INIT(folio_workspace);
};

}  // namespace folio

#endif  // FOLIO_FOLIO_HPP
