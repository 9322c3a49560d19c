// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/packed.hpp>

#include <doctest/doctest.h>

#include <list>
#include <span>
#include <string>
#include <vector>

#include "support/says.hpp"

namespace gs = gradsync;

namespace {

constexpr std::size_t layers = 3;

template <class F>
std::string refusal(F&& f) {
    try {
        f();
    } catch (const gs::Error& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("packed gives parameters in the order of a forward, as views of the arenas") {
    std::vector<float> weights(10 + 3 * 4 + 3 * 2 + 5), gradients(weights.size());
    const gs::Packed model =
        gs::packed(weights, gradients, {{"embedding", {5, 2}, 0, 2}, {"w", {2, 2}, layers}, {"b", {2}, layers}, {"norm", {5}}});
    std::string names;
    for (const gs::ParameterView& p : model) names += p.name + " ";
    CHECK(names == "embedding w.0 b.0 w.1 b.1 w.2 b.2 norm ");
    CHECK(model.size() == 8);
    CHECK(model.layers() == layers);
    CHECK(std::vector<std::size_t>(model.layer(1).begin(), model.layer(1).end()) == std::vector<std::size_t>{3, 4});
    CHECK(model.index("norm") == 7);
    CHECK(model.index("b", 2) == 6);
    CHECK(model[6].arena == gradients.data());
    CHECK(model[0].uses == 2);
    CHECK(model[0].shape == std::vector<std::size_t>{5, 2});
    CHECK(model[3].gradient.data == gradients.data() + 10 + 4);
    CHECK(model[3].value.data == weights.data() + 10 + 4);
    CHECK(model[3].gradient.count == 4);
    CHECK(model[6].gradient.data == gradients.data() + 10 + 12 + 4);
    CHECK(model[7].gradient.data == gradients.data() + 28);
}

TEST_CASE("packed makes a model without layers, and one without values") {
    std::vector<float> gradients(7);
    const gs::Packed model = gs::packed(gs::BufferView(), gradients, {{"a", {3}}, {"b", {4}}});
    CHECK(model.layers() == 0);
    CHECK(model.size() == 2);
    CHECK(model[1].value.data == nullptr);
    CHECK(model[1].gradient.data == gradients.data() + 3);
}

TEST_CASE("packed: a tensor is found by its own name, whatever the layers of others are named") {
    std::vector<float> weights(7), gradients(7);
    const gs::Packed model = gs::packed(weights, gradients, {{"w", {2}, 2}, {"w.1", {3}}});
    CHECK(model.index("w", 1) == 1);
    CHECK(model.index("w.1") == 2);
    CHECK(model.index("w.1", 1) == 2);
    CHECK(gradsync_test::says(refusal([&] { (void)model.index("w.0"); }), "there is no tensor 'w.0'"));
    CHECK(gradsync_test::says(refusal([&] { (void)model.index("w", 2); }), "there is no tensor 'w' of layer 2"));
}

TEST_CASE("packed: from any range of tensors, and from an array of sizes") {
    std::vector<float> weights(10 + 3 * 4 + 3 * 2 + 5), gradients(weights.size());
    const auto same = [&](const gs::Packed& model) {
        const gs::Packed listed = gs::packed(weights, gradients, {{"0", {10}}, {"1", {4}, layers}, {"2", {2}, layers}, {"3", {5}}});
        CHECK(model.size() == listed.size());
        for (std::size_t i = 0; i < listed.size(); ++i) {
            CHECK(model[i].name == listed[i].name);
            CHECK(model[i].shape == listed[i].shape);
            CHECK(model[i].gradient == listed[i].gradient);
            CHECK(model[i].value == listed[i].value);
        }
        CHECK(model.layers() == layers);
        CHECK(model.index("2", 1) == listed.index("2", 1));
    };
    const std::size_t sizes[] = {10, 3 * 4, 3 * 2, 5};
    const auto layers_of = [](std::size_t t) { return t == 1 || t == 2 ? layers : 0; };
    std::vector<gs::PackedTensor> tensors;
    for (const std::size_t size : sizes) {
        const std::size_t of_it = layers_of(tensors.size());
        tensors.push_back({std::to_string(tensors.size()), {of_it == 0 ? size : size / of_it}, of_it});
    }
    same(gs::packed(weights, gradients, tensors));
    same(gs::packed(weights, gradients, std::span<const gs::PackedTensor>(tensors)));
    same(gs::packed(weights, gradients, std::list<gs::PackedTensor>(tensors.begin(), tensors.end())));
    same(gs::packed(weights, gradients, sizes, layers_of));
    same(gs::packed(weights, gradients, std::vector<int>{10, 12, 6, 5}, [](std::size_t t) { return t % 3 == 0 ? 0 : 3; }));
}

TEST_CASE("packed refuses sizes that do not fit, and says which do") {
    using gradsync_test::says;
    std::vector<float> weights(10), short_weights(9), gradients(10);
    CHECK(says(refusal([&] {
                   (void)gs::packed(weights, gradients, {{"w", {3}, 3}});
               }),
               "the tensors have 9 elements together, the gradients 10"));
    CHECK(says(refusal([&] { (void)gs::packed(short_weights, gradients, {{"w", {10}}}); }), "the gradients 10, and the values 9"));
    CHECK(says(refusal([&] {
                   (void)gs::packed(weights, gradients, {{"w", {2}, 2}, {"b", {2}, 3}});
               }),
               "'b' has 3 layers, but others have 2"));
    CHECK(says(refusal([&] { (void)gs::packed(weights, gradients, std::vector{10}, [](std::size_t) { return 3; }); }),
               "the tensors have 9 elements together, the gradients 10"));
    const gs::Packed model = gs::packed(weights, gradients, {{"w", {5}, 2}});
    CHECK(says(refusal([&] { (void)model.layer(2); }), "there are 2 layers, and no layer 2"));
    CHECK(says(refusal([&] { (void)model.index("v"); }), "there is no tensor 'v'"));
}
