// folio_tensor.hpp: views of vectors, arrays, spans and mdspans have the memory, the shape, the strides and the dtype
// that is meant, and those that reach too far are refused. Compiled as C++17 and as C++20, where there is std::span.
#include "expect.h"
#include <folio/folio_tensor.hpp>

#include <array>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>
#if __cplusplus >= 202002L
#include <span>
#endif
#if __cplusplus > 202002L && __has_include(<mdspan>)
#include <mdspan>
#endif

// A 16-bit type of a host's own.
struct Brain {
    uint16_t bits;
};
template <>
struct folio::dtype_of<Brain> {
    static constexpr folio_dtype value = FOLIO_BFLOAT16;
};

// What std::mdspan and its forerunners have in common.
template <class Element, size_t rank_>
struct Strided {
    struct Extents {
        std::array<size_t, rank_> extent_;
        static constexpr size_t rank() { return rank_; }
        size_t extent(size_t i) const { return extent_[i]; }
    };
    using element_type = Element;
    Element *data_;
    Extents extents_;
    std::array<size_t, rank_> stride_;
    bool strided_ = true;

    Element *data_handle() const { return data_; }
    const Extents &extents() const { return extents_; }
    size_t stride(size_t i) const { return stride_[i]; }
    size_t size() const { return 0; } // never asked
    bool is_strided() const { return strided_; }
};

// A view of a temporary would dangle.
static_assert(std::is_constructible_v<folio::Tensor, std::vector<float> &>);
static_assert(std::is_constructible_v<folio::Tensor, const std::vector<float> &>);
static_assert(!std::is_constructible_v<folio::Tensor, std::vector<float>>);
static_assert(!std::is_constructible_v<folio::Tensor, std::array<float, 2>, folio_dtype>);

namespace {

bool same(folio_dtype a, folio_dtype b)
{
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// Whether a tensor is this memory with these extents and, where there are any, these strides.
bool is(const folio_tensor *tensor, const void *data, folio_dtype dtype, std::vector<int64_t> shape,
        std::vector<int64_t> strides = {})
{
    const auto rank = static_cast<size_t>(tensor->ndim);
    return tensor->data == data && same(tensor->dtype, dtype) && tensor->byte_offset == 0 &&
           tensor->device_type == FOLIO_DEVICE_CPU && std::vector<int64_t>(tensor->shape, tensor->shape + rank) == shape &&
           (strides.empty() ? tensor->strides == nullptr
                            : std::vector<int64_t>(tensor->strides, tensor->strides + rank) == strides);
}

template <class Make>
std::string refusal(folio_status status, Make make)
{
    try {
        make();
    } catch (const folio::Error &error) {
        EXPECT(error.status() == status);
        return error.what();
    }
    EXPECT(!"it is refused");
    return {};
}

void ranges()
{
    std::vector<float> floats(12);
    const std::vector<int64_t> slots{1, 2, 3};
    std::array<uint8_t, 4> bytes{};
    int32_t table[2][3] = {};
    const bool causal[2] = {true, false};
    std::vector<Brain> brains(6);

    folio::Tensor flat(floats), shaped(floats, {3, 4}), strided(floats, {2, 2}, {6, 1}), reused(floats, {4, 12}, {0, 1});
    EXPECT(is(flat, floats.data(), FOLIO_FLOAT32, {12}));
    EXPECT(is(shaped, floats.data(), FOLIO_FLOAT32, {3, 4}));
    EXPECT(is(strided, floats.data(), FOLIO_FLOAT32, {2, 2}, {6, 1}));
    EXPECT(is(reused, floats.data(), FOLIO_FLOAT32, {4, 12}, {0, 1}));

    folio::Tensor slot_mapping(slots), mask(bytes), pages(table), block_table(table, {2, 3}), requests(causal);
    folio::Tensor rows(brains, {2, 3});
    EXPECT(is(slot_mapping, slots.data(), FOLIO_INT64, {3}));
    EXPECT(is(mask, bytes.data(), FOLIO_UINT8, {4}));
    EXPECT(is(pages, table, FOLIO_INT32, {6}));
    EXPECT(is(block_table, table, FOLIO_INT32, {2, 3}));
    EXPECT(is(requests, causal, FOLIO_DTYPE(6, 8), {2}));
    EXPECT(is(rows, brains.data(), FOLIO_BFLOAT16, {2, 3}));
}

void explicit_dtypes()
{
    std::vector<uint16_t> halves(8);
    std::vector<uint8_t> fp8(8);
    std::vector<std::byte> raw(32);
    folio::Tensor flat(halves, FOLIO_BFLOAT16), q(halves, FOLIO_FLOAT16, {2, 4}), k(fp8, FOLIO_FLOAT8_E4M3, {2, 2}, {4, 1}),
        floats(raw, FOLIO_FLOAT32, {2, 4}), all(raw, FOLIO_INT64);
    EXPECT(is(flat, halves.data(), FOLIO_BFLOAT16, {8}));
    EXPECT(is(q, halves.data(), FOLIO_FLOAT16, {2, 4}));
    EXPECT(is(k, fp8.data(), FOLIO_FLOAT8_E4M3, {2, 2}, {4, 1}));
    EXPECT(is(floats, raw.data(), FOLIO_FLOAT32, {2, 4}));
    EXPECT(is(all, raw.data(), FOLIO_INT64, {4}));
    EXPECT(refusal(FOLIO_ERR_DTYPE, [&] { folio::Tensor wrong(halves, FOLIO_FLOAT32, {4}); }) ==
           "Tensor: elements of 16 bits are no elements of a dtype of 32 bits");
}

void devices()
{
    std::vector<float> floats(4);
    folio::Tensor tensor(floats, {2, 2}, folio::Device{FOLIO_DEVICE_CUDA, 1});
    const folio_tensor *described = tensor;
    EXPECT(described->device_type == FOLIO_DEVICE_CUDA && described->device_id == 1);
}

void what_reaches_too_far_is_refused()
{
    std::vector<float> floats(12);
    std::vector<float> none;
    folio::Tensor exact(floats, {2, 2, 2}, {6, 4, 1}), empty(none, {0, 4}), of_none(none);
    EXPECT(is(empty, none.data(), FOLIO_FLOAT32, {0, 4}) && is(of_none, none.data(), FOLIO_FLOAT32, {0}));
    EXPECT(refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(floats, {3, 5}); }) ==
           "Tensor: shape [3, 5] reaches beyond the 12 elements that are there");
    EXPECT(refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(floats, {2, 2, 2}, {6, 6, 1}); }) ==
           "Tensor: shape [2, 2, 2] with strides [6, 6, 1] reaches beyond the 12 elements that are there");
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(floats, {-1, 4}); });
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(floats, {2, 2}, {-1, 1}); });
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(floats, {INT64_MAX, INT64_MAX}); });
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(floats, {2, 2}, {INT64_MAX, 1}); });
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(floats, {1, 1, 1, 1, 1, 1}); });
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(floats, {2, 2}, {1}); });
}

void mdspans()
{
    std::vector<float> floats(24);
    std::vector<uint16_t> halves(6);
    Strided<const float, 3> view{floats.data(), {{2, 3, 4}}, {12, 4, 1}};
    Strided<uint16_t, 2> columns{halves.data(), {{2, 3}}, {1, 2}};
    folio::Tensor q(view), k(columns, FOLIO_BFLOAT16);
    EXPECT(is(q, floats.data(), FOLIO_FLOAT32, {2, 3, 4}, {12, 4, 1}));
    EXPECT(is(k, halves.data(), FOLIO_BFLOAT16, {2, 3}, {1, 2}));
    refusal(FOLIO_ERR_DTYPE, [&] { folio::Tensor wrong(columns, FOLIO_FLOAT32); });
    Strided<float, 6> deep{floats.data(), {{1, 1, 1, 1, 1, 1}}, {1, 1, 1, 1, 1, 1}};
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(deep); });
    view.strided_ = false;
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(view); });
#ifdef __cpp_lib_mdspan
    std::mdspan<float, std::dextents<int, 2>, std::layout_left> left(floats.data(), 4, 6);
    folio::Tensor transposed(left);
    EXPECT(is(transposed, floats.data(), FOLIO_FLOAT32, {4, 6}, {1, 4}));
#endif
}

#if __cplusplus >= 202002L
// A span is a view itself: one that nobody keeps is as good as any.
void spans()
{
    std::vector<float> floats(12);
    const std::vector<int32_t> ids(12);
    folio::Tensor tail(std::span{floats}.subspan(4), {2, 4}), pages(std::span{ids}.first(3));
    EXPECT(is(tail, floats.data() + 4, FOLIO_FLOAT32, {2, 4}));
    EXPECT(is(pages, ids.data(), FOLIO_INT32, {3}));
    refusal(FOLIO_ERR_SHAPE, [&] { folio::Tensor wrong(std::span{floats}.subspan(4), {3, 4}); });
}
#endif

} // namespace

int main()
{
    ranges();
    explicit_dtypes();
    devices();
    what_reaches_too_far_is_refused();
    mdspans();
#if __cplusplus >= 202002L
    spans();
#endif
    return 0;
}
