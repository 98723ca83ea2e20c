// Folio behind Paddle's tensors: the library, one context per device, handles that are made once and kept, and errors
// as Paddle throws them. Every op begins with `guarded`.
#pragma once

#include "paddle/extension.h"

#include <folio/folio.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace folio_paddle {

using paddle::Tensor;
using OptionalTensor = paddle::optional<paddle::Tensor>;
namespace px = paddle::experimental;

/** Fails with one sentence: what the argument is and what would be accepted. */
[[noreturn]] void refuse(const std::string &sentence);

/** Fails unless `condition` holds. */
inline void require(bool condition, const std::string &sentence)
{
    if (!condition)
        refuse(sentence);
}

/**
 * Runs an op. Its failures leave as Paddle's own exception, with the op's name in front: Paddle's eager mode ends the
 * process at an exception of a foreign type.
 */
template <class Body>
auto guarded(const char *op, Body body) -> decltype(body())
{
    std::string sentence;
    try {
        return body();
    } catch (const folio::Error &error) {
        sentence = std::string(error.what()) + " (Folio status " + std::to_string(error.status()) + ")";
    } catch (const std::exception &error) {
        sentence = error.what();
    } catch (...) {
        sentence = "an exception of unknown type";
    }
    PD_THROW(op, ": ", sentence);
}

/** Where a tensor is, for Folio. Other places than CPU, pinned memory and CUDA are refused. */
folio::Device device_of(const Tensor &tensor);

/** The element type. */
folio_dtype dtype_of(const Tensor &tensor);

/** A compact view of a compact tensor in another shape; -1 is not accepted. Offset and strides are in elements. */
folio::Tensor view(const Tensor &tensor, folio::Tensor::Extents shape);
folio::Tensor view(const Tensor &tensor, folio::Tensor::Extents shape, folio::Tensor::Extents strides, int64_t offset = 0);

/** A tensor of lengths or ids as one dimension: [B, 1] and [B] are the same. */
folio::Tensor flat(const Tensor &tensor);

/** Whether a CUDA graph is being captured. */
bool capturing();

/** The stream that ops on `tensor` run on; NULL on the CPU. */
void *stream_of(const Tensor &tensor);

/**
 * Waits until the stream of `tensor` has done what it was given. Copies between host and device run on that stream and are
 * waited for with this: Paddle's blocking copies run on the default stream, which waits for none that a program has made.
 */
void finish(const Tensor &tensor);

/** The device that a tensor is on. The first call of a process loads the library. */
const folio::Context &context_of(const Tensor &tensor);

/** Memory of a plan, on the host and on the device. */
struct Workspace {
    std::unique_ptr<folio::HostWorkspace> host_only;
    Tensor device, pinned;
    folio_workspace folio = FOLIO_INIT(folio_workspace);
};

/** As much memory as a handle asks for, on the device of `like`. */
Workspace allocate(const folio_workspace_info &info, const Tensor &like);

/** A handle with its workspace. Plan and run are one critical section: an op holds `busy` from one to the other. */
template <class Handle>
struct Kept {
    Kept(const folio::Context &context, const typename Handle::Desc &desc, const Tensor &like)
        : handle(context, desc), workspace(allocate(handle.workspace(), like))
    {
    }
    Handle handle;
    Workspace workspace;
    std::mutex busy;
};

/** Folio's prefill and MLA handles, with the names of their structs. */
struct Prefill : folio::Prefill {
    using Desc = folio_prefill_desc;
    using Args = folio_attention_args;
    using folio::Prefill::Prefill;
};
struct Mla : folio::Mla {
    using Desc = folio_mla_desc;
    using Args = folio_mla_args;
    using folio::Mla::Mla;
};

/**
 * The handle of a desc on a device, made at its first use. On CUDA every handle can be captured in a graph, and belongs
 * to one page table, whose address graphs keep. A capture makes no handle: the op must have run once before.
 */
template <class Handle>
Kept<Handle> &kept(const Tensor &like, const typename Handle::Desc &desc, const Tensor *page_table)
{
    static std::mutex mutex;
    static auto *handles = new std::map<std::string, std::unique_ptr<Kept<Handle>>>; /* outlives Paddle's statics */
    const folio::Device device = device_of(like);
    const void *table = device.type == FOLIO_DEVICE_CUDA && page_table ? page_table->data() : nullptr;
    std::string key(reinterpret_cast<const char *>(&desc), sizeof desc);
    key.append(reinterpret_cast<const char *>(&device), sizeof device);
    key.append(reinterpret_cast<const char *>(&table), sizeof table);

    std::lock_guard<std::mutex> lock(mutex);
    auto &slot = (*handles)[key];
    if (!slot) {
        require(!capturing(), "this shape has not been computed before the capture; run it once, then capture");
        slot = std::make_unique<Kept<Handle>>(context_of(like), desc, like);
    }
    return *slot;
}

/** Plans a batch and computes one layer. */
template <class Handle>
void compute(const Tensor &like, const typename Handle::Desc &desc, const folio_batch &batch,
             const typename Handle::Args &args, const Tensor *page_table)
{
    auto &one = kept<Handle>(like, desc, page_table);
    std::lock_guard<std::mutex> lock(one.busy);
    void *stream = stream_of(like);
    one.handle.plan(batch, one.workspace.folio, stream);
    one.handle.run(args, stream);
}

/** The next power of two: sizes that come are many, handles should be few. */
uint32_t rounded_up(int64_t count);

}  // namespace folio_paddle
