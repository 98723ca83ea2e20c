// Folio as PyTorch operators, on CPU tensors and, where Folio has the kernels, on CUDA tensors and the
// current stream:
//
//   torch.classes.folio.Decode, torch.classes.folio.Prefill    handles: plan once per step, run per layer
//   torch.ops.folio.append, torch.ops.folio.merge
//
// It is written against PyTorch's device-independent interface and folio.hpp, so it needs no CUDA headers.
// A serving engine would describe more (sinks, soft caps, fp8 scales): they are fields to be filled in.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <folio/folio.hpp>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <tuple>

namespace {

folio_dtype dtype_of(at::ScalarType type)
{
    switch (type) {
    case at::kFloat: return FOLIO_FLOAT32;
    case at::kHalf: return FOLIO_FLOAT16;
    case at::kBFloat16: return FOLIO_BFLOAT16;
    case at::kFloat8_e4m3fn: return FOLIO_FLOAT8_E4M3;
    case at::kFloat8_e5m2: return FOLIO_FLOAT8_E5M2;
    case at::kByte: return FOLIO_UINT8;
    case at::kInt: return FOLIO_INT32;
    case at::kLong: return FOLIO_INT64;
    default: TORCH_CHECK_TYPE(false, "Folio has no tensors of ", type);
    }
}

int32_t device_type_of(c10::Device device)
{
    TORCH_CHECK(device.is_cpu() || device.is_cuda(), "Folio has no tensors on ", device);
    return device.is_cuda() ? FOLIO_DEVICE_CUDA : FOLIO_DEVICE_CPU;
}

int32_t device_id_of(c10::Device device)
{
    return device.has_index() ? device.index() : 0;
}

// Describes a tensor's memory; shape and strides are the tensor's own, which must outlive the result.
folio_tensor describe(const at::Tensor &tensor)
{
    folio_tensor described{};
    described.data = const_cast<void *>(tensor.const_data_ptr());
    described.device_type = device_type_of(tensor.device());
    described.device_id = device_id_of(tensor.device());
    described.ndim = static_cast<int32_t>(tensor.dim());
    described.dtype = dtype_of(tensor.scalar_type());
    described.shape = const_cast<int64_t *>(tensor.sizes().data());
    described.strides = const_cast<int64_t *>(tensor.strides().data());
    return described;
}

// PyTorch's current stream of the device; NULL on the CPU.
void *stream_of(c10::Device device)
{
    if (device.is_cpu())
        return nullptr;
    return c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
}

// One context per device, for the life of the process.
const folio::Context &context_of(c10::Device device)
{
    static std::mutex mutex;
    static std::map<std::pair<int32_t, int32_t>, folio::Context> contexts;
    const std::lock_guard<std::mutex> lock(mutex);
    auto desc = FOLIO_INIT(folio_context_desc);
    desc.device_type = device_type_of(device);
    desc.device_id = device_id_of(device);
    desc.num_threads = device.is_cpu() ? static_cast<uint32_t>(at::get_num_threads()) : 0;
    const auto key = std::make_pair(desc.device_type, desc.device_id);
    auto found = contexts.find(key);
    if (found == contexts.end())
        found = contexts.emplace(key, folio::Context(desc)).first;
    return found->second;
}

// The parts of both handles' descs that Python states.
template <class Desc>
Desc desc_of(at::ScalarType dtype, int64_t num_qo_heads, int64_t num_kv_heads, int64_t head_dim, int64_t page_size,
             int64_t max_batch_size, int64_t max_kv_len)
{
    auto desc = FOLIO_INIT(Desc);
    desc.q_dtype = dtype_of(dtype);
    desc.num_qo_heads = static_cast<uint32_t>(num_qo_heads);
    desc.num_kv_heads = static_cast<uint32_t>(num_kv_heads);
    desc.head_dim_qk = static_cast<uint32_t>(head_dim);
    desc.page_size = static_cast<uint32_t>(page_size);
    desc.max_batch_size = static_cast<uint32_t>(max_batch_size);
    desc.max_kv_len = static_cast<uint32_t>(max_kv_len);
    return desc;
}

// A handle with its workspace, which PyTorch allocates.
template <class Handle, class Desc>
class Attention : public torch::CustomClassHolder {
public:
    Attention(const Desc &desc, c10::Device device) : handle_(context_of(device), desc), device_(device)
    {
        const folio_workspace_info info = handle_.workspace();
        const auto bytes = at::TensorOptions().dtype(at::kByte);
        const auto alignment = static_cast<int64_t>(info.alignment);
        device_memory_ = at::empty({static_cast<int64_t>(info.device_bytes) + alignment}, bytes.device(device));
        host_memory_ = at::empty({static_cast<int64_t>(info.host_bytes) + alignment}, bytes.pinned_memory(device.is_cuda()));
        workspace_.device = aligned(device_memory_, info.alignment);
        workspace_.device_bytes = info.device_bytes;
        workspace_.host = aligned(host_memory_, info.alignment);
        workspace_.host_bytes = info.host_bytes;
    }

    // qo_indptr [batch + 1], block_table [batch, pages], kv_len [batch]: int32 on the CPU.
    void plan(const at::Tensor &qo_indptr, const at::Tensor &block_table, const at::Tensor &kv_len)
    {
        const folio_tensor rows = describe(qo_indptr), table = describe(block_table), lengths = describe(kv_len);
        auto batch = FOLIO_INIT(folio_batch);
        batch.qo_indptr = &rows;
        batch.block_table = &table;
        batch.kv_len = &lengths;
        handle_.plan(batch, workspace_, stream_of(device_));
    }

    // o and lse (base e) of the planned batch. sm_scale 0: 1 / sqrt(head_dim); window_left -1: no window.
    std::tuple<at::Tensor, at::Tensor> run(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache,
                                           double sm_scale, bool causal, int64_t window_left) const
    {
        const at::Tensor o = at::empty_like(q, at::MemoryFormat::Contiguous);
        const at::Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
        const folio_tensor q_ = describe(q), k = describe(k_cache), v = describe(v_cache), o_ = describe(o), lse_ = describe(lse);
        auto args = FOLIO_INIT(folio_attention_args);
        args.q = &q_;
        args.k = &k;
        args.v = &v;
        args.o = &o_;
        args.lse = &lse_;
        args.sm_scale = static_cast<float>(sm_scale);
        args.mask_mode = causal ? FOLIO_MASK_CAUSAL : FOLIO_MASK_FULL;
        if (window_left >= 0) {
            args.flags |= FOLIO_RUN_WINDOW;
            args.window_left = static_cast<int32_t>(window_left);
            args.window_right = -1;
        }
        handle_.run(args, stream_of(device_));
        return {o, lse};
    }

    std::string kernel() const { return handle_.kernel(); }

private:
    static void *aligned(const at::Tensor &memory, uint64_t alignment)
    {
        const auto address = reinterpret_cast<uintptr_t>(memory.mutable_data_ptr());
        return reinterpret_cast<void *>((address + alignment - 1) / alignment * alignment);
    }

    Handle handle_;
    c10::Device device_;
    at::Tensor device_memory_, host_memory_;
    folio_workspace workspace_ = FOLIO_INIT(folio_workspace);
};

using Decode = Attention<folio::Decode, folio_decode_desc>;
using Prefill = Attention<folio::Prefill, folio_prefill_desc>;

c10::intrusive_ptr<Decode> make_decode(at::ScalarType dtype, int64_t num_qo_heads, int64_t num_kv_heads,
                                       int64_t head_dim, int64_t page_size, int64_t max_batch_size,
                                       int64_t max_kv_len, c10::Device device)
{
    const auto desc = desc_of<folio_decode_desc>(dtype, num_qo_heads, num_kv_heads, head_dim, page_size,
                                                 max_batch_size, max_kv_len);
    return c10::make_intrusive<Decode>(desc, device);
}

c10::intrusive_ptr<Prefill> make_prefill(at::ScalarType dtype, int64_t num_qo_heads, int64_t num_kv_heads,
                                         int64_t head_dim, int64_t page_size, int64_t max_batch_size,
                                         int64_t max_kv_len, int64_t max_num_tokens, c10::Device device)
{
    auto desc = desc_of<folio_prefill_desc>(dtype, num_qo_heads, num_kv_heads, head_dim, page_size, max_batch_size,
                                            max_kv_len);
    desc.max_num_tokens = static_cast<uint32_t>(max_num_tokens);
    return c10::make_intrusive<Prefill>(desc, device);
}

void append(const at::Tensor &key, const at::Tensor &value, const at::Tensor &k_cache, const at::Tensor &v_cache,
            const at::Tensor &slot_mapping, double k_scale, double v_scale)
{
    const folio_tensor k = describe(key), v = describe(value), slots = describe(slot_mapping);
    const folio_tensor k_cache_ = describe(k_cache), v_cache_ = describe(v_cache);
    auto args = FOLIO_INIT(folio_kv_append_args);
    args.key = &k;
    args.value = &v;
    args.k_cache = &k_cache_;
    args.v_cache = &v_cache_;
    args.slot_mapping = &slots;
    args.k_scale = static_cast<float>(k_scale);
    args.v_scale = static_cast<float>(v_scale);
    context_of(key.device()).append(args, stream_of(key.device()));
}

std::tuple<at::Tensor, at::Tensor> merge(const at::Tensor &o_a, const at::Tensor &lse_a, const at::Tensor &o_b,
                                         const at::Tensor &lse_b)
{
    const at::Tensor o = at::empty_like(o_a), lse = at::empty_like(lse_a);
    const folio_tensor v_a = describe(o_a), s_a = describe(lse_a), v_b = describe(o_b), s_b = describe(lse_b);
    const folio_tensor v_out = describe(o), s_out = describe(lse);
    auto args = FOLIO_INIT(folio_merge_state_args);
    args.v_a = &v_a;
    args.s_a = &s_a;
    args.v_b = &v_b;
    args.s_b = &s_b;
    args.v_out = &v_out;
    args.s_out = &s_out;
    context_of(o_a.device()).merge(args, stream_of(o_a.device()));
    return {o, lse};
}

} // namespace

TORCH_LIBRARY(folio, library)
{
    library.class_<Decode>("Decode")
        .def(torch::init(&make_decode))
        .def("plan", &Decode::plan)
        .def("run", &Decode::run)
        .def("kernel", &Decode::kernel);
    library.class_<Prefill>("Prefill")
        .def(torch::init(&make_prefill))
        .def("plan", &Prefill::plan)
        .def("run", &Prefill::run)
        .def("kernel", &Prefill::kernel);
    library.def("append(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
                "float k_scale=1.0, float v_scale=1.0) -> ()",
                &append);
    library.def("merge(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> (Tensor, Tensor)", &merge);
}
