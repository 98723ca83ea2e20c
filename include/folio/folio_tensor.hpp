/**
 * @file folio_tensor.hpp
 * Views of a host's memory as Folio's tensors: of pointers, of std::vector, std::array, std::span and C arrays, and of
 * std::mdspan.
 *
 *     std::vector<float> q_data(batch * heads * dim);
 *     folio::Tensor q(q_data, {batch, heads, dim});                    // float32, from the element type
 *     std::vector<uint16_t> k_data(...);
 *     folio::Tensor k(k_data, FOLIO_BFLOAT16, {pages, size, heads, dim}); // the element type does not say which
 *     args.q = q;
 *
 * A view that reaches beyond its vector or span is refused here. Of pointers only the host knows how far they reach.
 */

#ifndef FOLIO_FOLIO_TENSOR_HPP
#define FOLIO_FOLIO_TENSOR_HPP

#include <folio/folio.h>
#include <folio/folio_error.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#if __cplusplus >= 202002L
#include <ranges>
#endif
#if __cplusplus > 202002L && __has_include(<stdfloat>)
#include <stdfloat>
#endif

namespace folio {

/** Where a tensor's memory is. */
struct Device {
    int32_t type = FOLIO_DEVICE_CPU; /**< FOLIO_DEVICE_… */
    int32_t id = 0;                  /**< ordinal */
};

/**
 * The folio_dtype of an element type. A host may specialise it for types of its own:
 *
 *     template <> struct folio::dtype_of<__nv_bfloat16> { static constexpr folio_dtype value = FOLIO_BFLOAT16; };
 */
template <class Element>
struct dtype_of;

/** @cond */
template <>
struct dtype_of<float> {
    static constexpr folio_dtype value = FOLIO_FLOAT32;
};
template <>
struct dtype_of<int32_t> {
    static constexpr folio_dtype value = FOLIO_INT32;
};
template <>
struct dtype_of<int64_t> {
    static constexpr folio_dtype value = FOLIO_INT64;
};
template <>
struct dtype_of<uint8_t> {
    static constexpr folio_dtype value = FOLIO_UINT8;
};
template <>
struct dtype_of<bool> {
    static constexpr folio_dtype value = FOLIO_DTYPE(6, 8);
};
#ifdef __STDCPP_FLOAT16_T__
template <>
struct dtype_of<std::float16_t> {
    static constexpr folio_dtype value = FOLIO_FLOAT16;
};
#endif
#ifdef __STDCPP_BFLOAT16_T__
template <>
struct dtype_of<std::bfloat16_t> {
    static constexpr folio_dtype value = FOLIO_BFLOAT16;
};
#endif
/** @endcond */

namespace detail {

template <class T, class = void>
struct has_dtype : std::false_type {};
template <class T>
struct has_dtype<T, std::void_t<decltype(dtype_of<T>::value)>> : std::true_type {};

template <class T>
constexpr folio_dtype deduced_dtype()
{
    static_assert(has_dtype<T>::value,
                  "the element type names no dtype: pass one (FOLIO_BFLOAT16, ...), or specialise folio::dtype_of");
    return dtype_of<T>::value;
}

/** std::mdspan, its forerunners, and what else has extents, strides and a pointer. */
template <class T, class = void>
struct is_mdspan : std::false_type {};
template <class T>
struct is_mdspan<T, std::void_t<decltype(*std::declval<const T &>().data_handle()),
                                decltype(std::declval<const T &>().stride(0)),
                                decltype(std::declval<const T &>().extents().extent(0))>> : std::true_type {};

template <class T, class = void>
struct says_strided : std::false_type {};
template <class T>
struct says_strided<T, std::void_t<decltype(std::declval<const T &>().is_strided())>> : std::true_type {};

/** Elements one after another: std::vector, std::array, std::span, arrays. */
template <class T, class = void>
struct is_contiguous : std::false_type {};
template <class T>
struct is_contiguous<T, std::void_t<decltype(std::data(std::declval<T &>())), decltype(std::size(std::declval<T &>()))>>
    : std::bool_constant<!is_mdspan<T>::value> {};

/** A tensor views memory, so a vector has to be somebody's: temporaries are accepted of spans only. */
template <class Range>
#if __cplusplus >= 202002L
inline constexpr bool outlives_call =
    std::is_lvalue_reference_v<Range> || std::ranges::enable_borrowed_range<std::remove_cvref_t<Range>>;
#else
inline constexpr bool outlives_call = std::is_lvalue_reference_v<Range>;
#endif

template <class Range>
using if_range = std::enable_if_t<is_contiguous<std::remove_reference_t<Range>>::value && outlives_call<Range>>;

/** Of arrays of arrays, the innermost element. */
template <class Range>
using element_of =
    std::remove_cv_t<std::remove_all_extents_t<std::remove_pointer_t<decltype(std::data(std::declval<Range &>()))>>>;

/** The element of an mdspan. */
template <class Mdspan>
using viewed_by = std::remove_cv_t<std::remove_reference_t<decltype(*std::declval<const Mdspan &>().data_handle())>>;

/** Bytes may hold anything; other elements are as large as the dtype says. */
template <class Element>
void check_element(folio_dtype dtype)
{
    constexpr bool bytes = std::is_same_v<Element, std::byte> || std::is_same_v<Element, char> ||
                           std::is_same_v<Element, unsigned char>;
    if (!bytes && dtype.bits != 8 * sizeof(Element))
        fail(FOLIO_ERR_DTYPE, "Tensor: elements of " + std::to_string(8 * sizeof(Element)) +
                                  " bits are no elements of a dtype of " + std::to_string(dtype.bits) + " bits");
}

}  // namespace detail

/**
 * A view of memory that is not owned, with a shape that is. Converts to what folio.h's structs take:
 *
 *     folio::Tensor q(q_data, FOLIO_BFLOAT16, {batch, heads, dim});
 *     args.q = q;
 *
 * The struct then points into the Tensor, which must outlive the call. Memory of constants is written to only where
 * folio.h calls a tensor an output.
 */
class Tensor {
public:
    /** Extents or strides, outermost first. */
    using Extents = std::initializer_list<int64_t>;

    /** Compact, row-major. */
    Tensor(const void *data, folio_dtype dtype, Extents shape, Device device = {}) : Tensor(data, dtype, shape, {}, device)
    {
    }

    /** A view with strides in elements; none means compact. */
    Tensor(const void *data, folio_dtype dtype, Extents shape, Extents strides, Device device = {})
    {
        if (shape.size() > shape_.size() || (strides.size() != 0 && strides.size() != shape.size()))
            detail::fail(FOLIO_ERR_SHAPE, "Tensor: at most 5 extents are accepted, and as many strides or none");
        std::copy(shape.begin(), shape.end(), shape_.begin());
        std::copy(strides.begin(), strides.end(), strides_.begin());
        describe(data, dtype, shape.size(), strides.size() != 0, device);
    }

    /** All elements of a vector, an array or a span, in one dimension: lengths, page ids, scales. */
    template <class Range, class = detail::if_range<Range>>
    explicit Tensor(Range &&values, Device device = {})
        : Tensor(values, detail::deduced_dtype<detail::element_of<Range>>(), device)
    {
    }

    /** Compact elements of a vector, an array or a span. */
    template <class Range, class = detail::if_range<Range>>
    Tensor(Range &&values, Extents shape, Device device = {}) : Tensor(values, shape, {}, device)
    {
    }

    /** Elements of a vector, an array or a span, with strides in elements; none means compact. */
    template <class Range, class = detail::if_range<Range>>
    Tensor(Range &&values, Extents shape, Extents strides, Device device = {})
        : Tensor(values, detail::deduced_dtype<detail::element_of<Range>>(), shape, strides, device)
    {
    }

    /** All elements in one dimension, with the dtype that their type does not say. */
    template <class Range, class = detail::if_range<Range>>
    Tensor(Range &&values, folio_dtype dtype, Device device = {})
        : Tensor(values, dtype, {elements_in(bytes_of(values), dtype)}, {}, device)
    {
    }

    /** Compact elements, with the dtype that their type does not say: uint16_t for bfloat16, bytes for anything. */
    template <class Range, class = detail::if_range<Range>>
    Tensor(Range &&values, folio_dtype dtype, Extents shape, Device device = {}) : Tensor(values, dtype, shape, {}, device)
    {
    }

    /** Elements with strides, and with the dtype that their type does not say. */
    template <class Range, class = detail::if_range<Range>>
    Tensor(Range &&values, folio_dtype dtype, Extents shape, Extents strides, Device device = {})
        : Tensor(static_cast<const void *>(std::data(values)), dtype, shape, strides, device)
    {
        detail::check_element<detail::element_of<Range>>(dtype);
        check_reach(bytes_of(values));
    }

    /** What an mdspan views: its extents and strides. */
    template <class Mdspan, std::enable_if_t<detail::is_mdspan<Mdspan>::value, int> = 0>
    explicit Tensor(const Mdspan &view, Device device = {})
        : Tensor(view, detail::deduced_dtype<detail::viewed_by<Mdspan>>(), device)
    {
    }

    /** What an mdspan views, with the dtype that its elements' type does not say. */
    template <class Mdspan, std::enable_if_t<detail::is_mdspan<Mdspan>::value, int> = 0>
    Tensor(const Mdspan &view, folio_dtype dtype, Device device = {})
    {
        detail::check_element<detail::viewed_by<Mdspan>>(dtype);
        const auto rank = static_cast<size_t>(view.extents().rank());
        bool strided = true;
        if constexpr (detail::says_strided<Mdspan>::value)
            strided = view.is_strided();
        if (rank > shape_.size() || !strided)
            detail::fail(FOLIO_ERR_SHAPE, "Tensor: an mdspan of at most 5 extents with strides is accepted");
        for (size_t i = 0; i < rank; i++) {
            shape_[i] = static_cast<int64_t>(view.extents().extent(i));
            strides_[i] = static_cast<int64_t>(view.stride(i));
        }
        describe(view.data_handle(), dtype, rank, true, device);
    }

    /** A view of the same memory with a shape of its own. */
    Tensor(const Tensor &other) noexcept { *this = other; }

    /** As copying. */
    Tensor &operator=(const Tensor &other) noexcept
    {
        shape_ = other.shape_;
        strides_ = other.strides_;
        tensor_ = other.tensor_;
        tensor_.shape = shape_.data();
        tensor_.strides = other.tensor_.strides ? strides_.data() : nullptr;
        return *this;
    }

    /** For the fields of folio.h's structs. */
    operator const folio_tensor *() const & noexcept { return &tensor_; }
    operator const folio_tensor *() const && = delete; /* it would dangle */

private:
    void describe(const void *data, folio_dtype dtype, size_t ndim, bool strided, Device device) noexcept
    {
        tensor_.data = const_cast<void *>(data);
        tensor_.device_type = device.type;
        tensor_.device_id = device.id;
        tensor_.ndim = static_cast<int32_t>(ndim);
        tensor_.dtype = dtype;
        tensor_.strides = strided ? strides_.data() : nullptr;
        tensor_.shape = shape_.data();
    }

    template <class Range>
    static size_t bytes_of(const Range &values) noexcept
    {
        return std::size(values) * sizeof(*std::data(values));
    }

    static int64_t elements_in(size_t bytes, folio_dtype dtype) noexcept
    {
        return static_cast<int64_t>(bytes * 8 / std::max<size_t>(dtype.bits, 1));
    }

    /** Refuses a view that ends behind `bytes` bytes, or whose end is no number. */
    void check_reach(size_t bytes) const
    {
        int64_t reach = 1, compact = 1;
        bool countable = true, empty = false;
        for (size_t i = static_cast<size_t>(tensor_.ndim); i-- > 0;) {
            const int64_t stride = tensor_.strides ? strides_[i] : compact;
            int64_t steps = 0;
            countable = countable && shape_[i] >= 0 && stride >= 0 &&
                        !__builtin_mul_overflow(shape_[i] - 1, stride, &steps) &&
                        !__builtin_add_overflow(reach, steps, &reach) &&
                        !__builtin_mul_overflow(compact, std::max<int64_t>(shape_[i], 1), &compact);
            empty = empty || shape_[i] == 0;
        }
        const int64_t available = elements_in(bytes, tensor_.dtype);
        if (!countable || (!empty && reach > available))
            detail::fail(FOLIO_ERR_SHAPE, "Tensor: shape " + list(shape_) +
                                              (tensor_.strides ? " with strides " + list(strides_) : "") +
                                              " reaches beyond the " + std::to_string(available) +
                                              " elements that are there");
    }

    std::string list(const std::array<int64_t, 5> &numbers) const
    {
        std::string text = "[";
        for (int32_t i = 0; i < tensor_.ndim; i++)
            text += (i ? ", " : "") + std::to_string(numbers[static_cast<size_t>(i)]);
        return text + "]";
    }

    folio_tensor tensor_{};
    std::array<int64_t, 5> shape_{};
    std::array<int64_t, 5> strides_{};
};

}  // namespace folio

#endif  // FOLIO_FOLIO_TENSOR_HPP
