// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: pass a mutable range: the library writes the result into it
// errors: 1
#include <vector>

#include <gradsync/core/parameter.hpp>

struct Layer {
    std::vector<float> weights, gradients;
};

template <>
struct gradsync::parameter_traits<Layer> {
#ifdef GRADSYNC_EXPECT_FAILURE
    static const std::vector<float>& gradient(const Layer& layer) { return layer.gradients; }
#else
    static std::vector<float>& gradient(Layer& layer) { return layer.gradients; }
#endif
};

void f(Layer& layer) { (void)gradsync::parameter_view(layer); }
