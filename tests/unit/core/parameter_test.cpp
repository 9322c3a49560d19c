// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/parameter.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

using namespace gradsync;

namespace {

struct Full {
    std::vector<float> weights = std::vector<float>(6, 1.0f), gradient = std::vector<float>(6, 2.0f);
};
struct Least {
    std::array<double, 3> gradient{};
};
struct Handle {
    float* data;
    std::size_t count;
};
struct Unsupported {};

/// As Armadillo's matrices: pointers as iterators, and no `data()`.
struct ParameterMatrix {
    std::vector<float> elements = std::vector<float>(6);

    float* memptr() { return elements.data(); }
    float* begin() { return elements.data(); }
    const float* begin() const { return elements.data(); }
    float* end() { return elements.data() + elements.size(); }
    const float* end() const { return elements.data() + elements.size(); }
};

/// Another library's half, and a tensor of it that is no range.
struct TheirHalf {
    std::uint16_t bits;
};
struct TheirTensor {
    std::vector<TheirHalf> elements = std::vector<TheirHalf>(6);
};

}  // namespace

template <>
struct gradsync::dtype_traits<TheirHalf> {
    static constexpr DType value = DType::f16;
};
template <>
struct gradsync::buffer_traits<TheirTensor> {
    static constexpr MemorySpace space = MemorySpace::host;
    static constexpr bool owns = true;
    static BufferView view(TheirTensor& t) { return buffer(t.elements); }
    static ConstBufferView view(const TheirTensor& t) { return const_buffer(t.elements); }
    static std::array<int, 2> shape(const TheirTensor&) { return {2, 3}; }
};

template <>
struct gradsync::parameter_traits<Full> {
    static std::vector<float>& gradient(Full& t) { return t.gradient; }
    static std::span<float> value(Full& t) { return t.weights; }
    static std::string name(Full&) { return "fc.weight"; }
    static std::array<int, 2> shape(Full&) { return {2, 3}; }
    static bool requires_grad(Full&) { return false; }
    static int uses(Full&) { return 2; }
};
template <>
struct gradsync::parameter_traits<Least> {
    static BufferView gradient(Least& t) { return buffer(t.gradient); }
};

template <>
struct gradsync::parameter_traits<Handle> {
    [[maybe_unused]] static constexpr MemorySpace space = MemorySpace::host;
    static std::span<float> gradient(const Handle& t) { return {t.data, t.count}; }
};

static_assert(Parameter<Full> && Parameter<Full*> && Parameter<Least> && Parameter<ParameterView>);
static_assert(Parameter<std::vector<float>> && Parameter<std::span<double>> && Parameter<std::vector<float>*>);
static_assert(!Parameter<Unsupported> && !Parameter<Unsupported*> && !Parameter<int> && !Parameter<std::deque<float>> &&
              !Parameter<std::list<float>>);
static_assert(!Parameter<Full**>);
static_assert(Parameter<const Handle> && Parameter<const Handle*> && Parameter<const ParameterView>);
static_assert(!Parameter<const Full>, "its traits ask for a tensor that is not constant");

TEST_CASE("parameter_view takes over everything that parameter_traits say") {
    Full tensor;
    const ParameterView view = parameter_view(tensor);
    CHECK(view.name == "fc.weight");
    CHECK(view.value == BufferView{tensor.weights.data(), 6, DType::f32, MemorySpace::host});
    CHECK(view.gradient == BufferView{tensor.gradient.data(), 6, DType::f32, MemorySpace::host});
    CHECK(view.shape == std::vector<std::size_t>{2, 3});
    CHECK(!view.requires_grad);
    CHECK(view.uses == 2);
}

TEST_CASE("parameter_view: what parameter_traits do not say has a default") {
    Least tensor;
    const ParameterView view = parameter_view(tensor);
    CHECK(view.name.empty());
    CHECK(view.value.data == nullptr);
    CHECK(view.gradient == BufferView{tensor.gradient.data(), 3, DType::f64, MemorySpace::host});
    CHECK(view.shape.empty());
    CHECK(view.requires_grad);
    CHECK(view.uses == 1);
}

TEST_CASE("parameter_view: a pointer to a tensor is that tensor") {
    Full tensor;
    Full* pointer = &tensor;
    Full* const constant = &tensor;
    CHECK(parameter_view(pointer).gradient == parameter_view(tensor).gradient);
    CHECK(parameter_view(constant).name == "fc.weight");
}

TEST_CASE("parameter_view: a smart pointer to a tensor is that tensor") {
    Full tensor;
    const std::unique_ptr<Full, void (*)(Full*)> unique(&tensor, [](Full*) {});
    std::shared_ptr<Full> shared(&tensor, [](Full*) {});
    CHECK(parameter_view(unique).gradient == parameter_view(tensor).gradient);
    CHECK(parameter_view(shared).name == "fc.weight");
    shared.reset();
    CHECK(parameter_view(shared).gradient == BufferView{});
    static_assert(require_parameter<std::unique_ptr<Full>>() && !Parameter<std::unique_ptr<int>> && !Parameter<Full**>);
    static_assert(!Parameter<std::optional<Full>>, "it owns the tensor");
}

TEST_CASE("parameter_view: a reference to a tensor is that tensor") {
    Full tensor;
    std::vector<std::reference_wrapper<Full>> references{tensor};
    CHECK(parameter_view(references[0]).gradient == parameter_view(tensor).gradient);
    CHECK(parameter_view(std::as_const(references)[0]).name == "fc.weight");
    static_assert(require_parameter<const std::reference_wrapper<Full>>() && !Parameter<std::reference_wrapper<int>>);
}

TEST_CASE("parameter_view: a constant handle is described by its type's traits") {
    std::vector<float> memory(4);
    const std::vector<Handle> handles{{memory.data(), 4}};
    const Handle* pointer = handles.data();
    CHECK(parameter_view(handles[0]).gradient == buffer(memory));
    CHECK(parameter_view(pointer).gradient == buffer(memory));
}

TEST_CASE("parameter_view: contiguous ranges are gradients without a name") {
    std::vector<BFloat16> vector(4);
    std::span<BFloat16> span(vector);
    const std::span<BFloat16> constant(vector);
    std::array<std::int64_t, 2> array{};
    CHECK(parameter_view(vector).gradient == BufferView{vector.data(), 4, DType::bf16, MemorySpace::host});
    CHECK(parameter_view(span).gradient == parameter_view(vector).gradient);
    CHECK(parameter_view(constant).gradient == parameter_view(vector).gradient);
    CHECK(parameter_view(array).gradient.dtype == DType::i64);
    std::vector<float> empty;
    CHECK(parameter_view(empty).gradient.count == 0);
}

TEST_CASE("parameter_view: a contiguous range without data() is a gradient, and a part of a parameter") {
    ParameterMatrix value, gradient;
    static_assert(Parameter<ParameterMatrix> && Parameter<ParameterMatrix*>);
    CHECK(parameter_view(gradient).gradient == BufferView{gradient.memptr(), 6, DType::f32, MemorySpace::host});
    const ParameterView view = parameter("w", value, tracked(gradient), {2, 3});
    CHECK(view.value == buffer(value));
    CHECK(view.gradient == buffer(gradient));
    CHECK(view.look(view.owner) == buffer(gradient));
}

TEST_CASE("parameter_view: a ParameterView is itself, constant or not") {
    std::vector<float> gradient(4);
    ParameterView view{.name = "w", .gradient = buffer(gradient), .uses = 3};
    const ParameterView& constant = view;
    CHECK(parameter_view(view).name == "w");
    CHECK(parameter_view(constant).uses == 3);
    CHECK(parameter_view(constant).gradient == buffer(gradient));
}

TEST_CASE("parameter() makes a ParameterView of two ranges") {
    std::vector<float> value(6), gradient(6);
    const ParameterView view = parameter("fc.weight", value, std::span(gradient), {2, 3});
    CHECK(view.name == "fc.weight");
    CHECK(view.value == buffer(value));
    CHECK(view.gradient == buffer(gradient));
    CHECK(view.shape == std::vector<std::size_t>{2, 3});
    CHECK(view.requires_grad);
    CHECK(view.uses == 1);
    CHECK(parameter("w", value, gradient).shape.empty());
}

TEST_CASE("a tensor with buffer_traits serves as buffer, as parameter, and as part of one") {
    TheirTensor t;
    const BufferView view{t.elements.data(), 6, DType::f16, MemorySpace::host};
    CHECK(buffer(t) == view);
    CHECK(const_buffer(std::as_const(t)) == ConstBufferView(view));
    static_assert(Parameter<TheirTensor> && Parameter<TheirTensor*>);
    static_assert(parameter_traits<TheirTensor>::space == MemorySpace::host);
    for (const ParameterView& p : {parameter_view(t), parameter("t", t, t)}) {
        CHECK(p.gradient == view);
        CHECK(p.shape == std::vector<std::size_t>{2, 3});
    }
    CHECK(parameter("t", t, t, {6}).shape == std::vector<std::size_t>{6});  // what is said counts
    const int rows = 3;
    const std::size_t columns = 2;
    CHECK(parameter("t", t, t, {rows, columns}).shape == std::vector<std::size_t>{3, 2});
    CHECK(parameter("t", t, t, std::vector<std::int64_t>{6, 1}).shape == std::vector<std::size_t>{6, 1});
}

TEST_CASE("buffer views are buffers and parameters themselves") {
    float x[2] = {};
    const BufferView device{x, 2, DType::f32, MemorySpace::device};
    CHECK(buffer(device) == device);
    CHECK(parameter("x", BufferView{}, device).gradient == device);
    std::vector<BufferView> views{device};
    CHECK(parameter_view(views[0]).gradient == device);
}

TEST_CASE("a view by value is fine, a range that owns its memory is not") {
    static_assert(!detail::owns_memory<std::span<float>>());
    static_assert(!detail::owns_memory<BufferView>());
    static_assert(detail::owns_memory<std::vector<float>>());
    static_assert(detail::owns_memory<std::array<float, 2>>());
    static_assert(detail::owns_memory<TheirTensor>());
}
