// The library, contexts and workspaces behind session.h.
#include "session.h"

#define FOLIO_BACKEND_THROW(sentence) ::folio_paddle::refuse(sentence)
#include "folio_backend.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>

#ifdef PADDLE_WITH_CUDA
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/gpu/cuda/cuda_graph_with_memory_pool.h"
#endif

namespace folio_paddle {
namespace {

// The library: FOLIO_LIBRARY, the loader's path, or where it was installed when this file was compiled.
const folio_api &library()
{
    static const folio_api *const api = [] {
        const auto environment = folio_backend::Environment::read();
        const auto found = folio_backend::resolve(folio_backend::candidates(environment, {FOLIO_INSTALLED}));
        require(found.api, "Folio cannot be used: " + found.failure + " Set FOLIO_LIBRARY to the path of libfolio.so.");
        return found.api;
    }();
    return *api;
}

// FOLIO_NUM_THREADS, or the CPUs that this process may use.
uint32_t num_threads()
{
    if (const char *text = std::getenv("FOLIO_NUM_THREADS")) {
        char *end = nullptr;
        const unsigned long count = std::strtoul(text, &end, 10);
        require(end != text && *end == '\0' && count >= 1 && count <= 1024,
                "FOLIO_NUM_THREADS is \"" + std::string(text) + "\"; 1 to 1024 are accepted");
        return static_cast<uint32_t>(count);
    }
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0)
        return 1;
    return static_cast<uint32_t>(std::max(1, CPU_COUNT(&cpus)));
}

}  // namespace

void refuse(const std::string &sentence) { throw std::invalid_argument(sentence); }

folio::Device device_of(const Tensor &tensor)
{
    const auto place = tensor.place();
    if (place.GetType() == phi::AllocationType::CPU)
        return {FOLIO_DEVICE_CPU, 0};
    if (place.GetType() == phi::AllocationType::GPUPINNED)
        return {FOLIO_DEVICE_CUDA_HOST, 0};
    if (place.GetType() == phi::AllocationType::GPU)
        return {FOLIO_DEVICE_CUDA, place.GetDeviceId()};
    refuse("a tensor is on " + place.DebugString() + "; CPU and GPU are accepted");
}

folio_dtype dtype_of(const Tensor &tensor)
{
    switch (tensor.dtype()) {
    case paddle::DataType::FLOAT32: return FOLIO_FLOAT32;
    case paddle::DataType::FLOAT16: return FOLIO_FLOAT16;
    case paddle::DataType::BFLOAT16: return FOLIO_BFLOAT16;
    case paddle::DataType::FLOAT8_E4M3FN: return FOLIO_FLOAT8_E4M3;
    case paddle::DataType::FLOAT8_E5M2: return FOLIO_FLOAT8_E5M2;
    case paddle::DataType::UINT8: return FOLIO_UINT8;
    case paddle::DataType::BOOL: return FOLIO_DTYPE(6, 8);
    case paddle::DataType::INT32: return FOLIO_INT32;
    case paddle::DataType::INT64: return FOLIO_INT64;
    default: refuse("a tensor's type is " + phi::DataTypeToString(tensor.dtype()) +
                    "; float32, float16, bfloat16, float8, uint8, bool, int32 and int64 are accepted");
    }
}

folio::Tensor view(const Tensor &tensor, folio::Tensor::Extents shape) { return view(tensor, shape, {}, 0); }

folio::Tensor view(const Tensor &tensor, folio::Tensor::Extents shape, folio::Tensor::Extents strides, int64_t offset)
{
    require(tensor.is_contiguous(), "a tensor has gaps; call contiguous() first");
    const auto *start = static_cast<const char *>(tensor.numel() == 0 ? nullptr : tensor.data());
    return folio::Tensor(start ? start + offset * static_cast<int64_t>(phi::SizeOf(tensor.dtype())) : nullptr,
                         dtype_of(tensor), shape, strides, device_of(tensor));
}

folio::Tensor flat(const Tensor &tensor) { return view(tensor, {tensor.numel()}); }

bool capturing()
{
#ifdef PADDLE_WITH_CUDA
    return phi::backends::gpu::IsCUDAGraphCapturing();
#else
    return false;
#endif
}

void *stream_of(const Tensor &tensor)
{
#ifdef PADDLE_WITH_CUDA
    if (tensor.is_gpu())
        return reinterpret_cast<void *>(tensor.stream());
#endif
    (void)tensor;
    return nullptr;
}

void finish(const Tensor &tensor)
{
#ifdef PADDLE_WITH_CUDA
    if (tensor.is_gpu())
        phi::DeviceContextPool::Instance().Get(tensor.place())->Wait();
#endif
    (void)tensor;
}

const folio::Context &context_of(const Tensor &tensor)
{
    static std::mutex mutex;
    static auto *contexts = new std::map<std::pair<int32_t, int32_t>, folio::Context>; /* outlives Paddle's statics */
    folio::Device device = device_of(tensor);
    if (device.type == FOLIO_DEVICE_CUDA_HOST)
        device = {FOLIO_DEVICE_CPU, 0};
    std::lock_guard<std::mutex> lock(mutex);
    const auto key = std::make_pair(device.type, device.id);
    auto found = contexts->find(key);
    if (found == contexts->end()) {
        auto desc = FOLIO_INIT(folio_context_desc);
        desc.device_type = device.type;
        desc.device_id = device.id;
        desc.num_threads = device.type == FOLIO_DEVICE_CPU ? num_threads() : 0;
        found = contexts->emplace(key, folio::Context(desc, library())).first;
    }
    return found->second;
}

Workspace allocate(const folio_workspace_info &info, const Tensor &like)
{
    Workspace workspace;
    if (!like.is_gpu()) {
        workspace.host_only = std::make_unique<folio::HostWorkspace>(info);
        workspace.folio = *workspace.host_only;
        return workspace;
    }
    // Paddle aligns its blocks on a GPU to 256 bytes.
    require(info.alignment <= 256, "Folio asks for an alignment above Paddle's 256 bytes");
    if (info.device_bytes != 0) {
        workspace.device = px::empty({static_cast<int64_t>(info.device_bytes)}, paddle::DataType::UINT8, like.place());
        workspace.folio.device = workspace.device.data();
        workspace.folio.device_bytes = info.device_bytes;
    }
    if (info.host_bytes != 0) {
        // Pinned blocks are aligned to 64 bytes alone.
        size_t room = info.host_bytes + info.alignment;
        // By a copy: `empty` knows no pinned memory, and would allocate on the GPU.
        const Tensor pageable =
            px::empty({static_cast<int64_t>(room)}, paddle::DataType::UINT8, paddle::CPUPlace());
        workspace.pinned = pageable.copy_to(phi::GPUPinnedPlace(), true);
        workspace.folio.host = workspace.pinned.data();
        std::align(info.alignment, info.host_bytes, workspace.folio.host, room);
        workspace.folio.host_bytes = info.host_bytes;
    }
    return workspace;
}

uint32_t rounded_up(int64_t count)
{
    require(count <= int64_t{1} << 30, "a batch has " + std::to_string(count) + " rows; up to 2^30 are accepted");
    uint32_t size = 1;
    while (size < count)
        size *= 2;
    return size;
}

}  // namespace folio_paddle
