// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: pass a std::span.pointer, count. of its gradient, or .* specialise gradsync::parameter_traits for this type
// errors: 1
#include <vector>

#include <gradsync/core/parameter.hpp>

struct Layer {
    std::vector<float> weights, gradients;
};

#ifndef GRADSYNC_EXPECT_FAILURE
template <>
struct gradsync::parameter_traits<Layer> {
    static std::vector<float>& gradient(Layer& layer) { return layer.gradients; }
};
#endif

void f(Layer& layer) { (void)gradsync::parameter_view(layer); }
