#include <gradsync/core/parameter.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <span>
#include <string>
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

}  // namespace

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
    static constexpr MemorySpace space = MemorySpace::host;
    static std::span<float> gradient(const Handle& t) { return {t.data, t.count}; }
};

static_assert(Parameter<Full> && Parameter<Full*> && Parameter<Least> && Parameter<ParameterView>);
static_assert(Parameter<std::vector<float>> && Parameter<std::span<double>> && Parameter<std::vector<float>*>);
static_assert(!Parameter<Unsupported> && !Parameter<Unsupported*> && !Parameter<int> && !Parameter<std::deque<float>> && !Parameter<std::list<float>>);
static_assert(!Parameter<Full**>);
static_assert(Parameter<const Handle> && Parameter<const Handle*> && Parameter<const ParameterView>);
static_assert(!Parameter<const Full>, "its traits ask for a tensor that is not constant");

TEST_CASE("parameter_view: everything that parameter_traits say") {
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

TEST_CASE("parameter_view: a ParameterView is itself, constant or not") {
    std::vector<float> gradient(4);
    ParameterView view{.name = "w", .gradient = buffer(gradient), .uses = 3};
    const ParameterView& constant = view;
    CHECK(parameter_view(view).name == "w");
    CHECK(parameter_view(constant).uses == 3);
    CHECK(parameter_view(constant).gradient == buffer(gradient));
}

TEST_CASE("parameter: two ranges, without a type of their own") {
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
