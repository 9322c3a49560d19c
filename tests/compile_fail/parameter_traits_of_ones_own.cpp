// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: pass a std::span.pointer, count. of its gradient, .* or specialise gradsync::parameter_traits for this type, with a public static function gradient
// expect 2: gradsync: make gradient\(\) in parameter_traits of this type static
// expect 3: gradsync: return or pass a reference to this tensor: a copy is gone
// expect 4: gradsync: return or pass a std::span\(pointer, count\)
// expect 5: gradsync: return or pass a std::span.pointer, count. if this tensor's elements are contiguous
// expect 6: gradsync: return a range of integers from shape\(\)
// expect 7: gradsync: pass a std::span.pointer, count. of its gradient, .* or specialise gradsync::parameter_traits for this type, with a public static function gradient
// expect 8: gradsync: use float, double, Float16, BFloat16
// expect 9: gradsync: make every function in parameter_traits of this type static
// errors: 1
#include <deque>
#include <vector>

#include <gradsync/core/parameter.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Layer {
    std::vector<float> weights, gradients;
    std::deque<float> history;
    std::vector<long double> sums;
};

template <>
#if GRADSYNC_EXPECT_FAILURE == 7
class gradsync::parameter_traits<Layer> {  // private
#else
struct gradsync::parameter_traits<Layer> {
#endif
#if GRADSYNC_EXPECT_FAILURE == 1
    static std::vector<float>& grad(Layer& layer) { return layer.gradients; }  // another name
#elif GRADSYNC_EXPECT_FAILURE == 2
    std::vector<float>& gradient(Layer& layer) { return layer.gradients; }
#elif GRADSYNC_EXPECT_FAILURE == 3
    static std::vector<float> gradient(Layer& layer) { return layer.gradients; }
#elif GRADSYNC_EXPECT_FAILURE == 4
    static float* gradient(Layer& layer) { return layer.gradients.data(); }
#elif GRADSYNC_EXPECT_FAILURE == 5
    static std::deque<float>& gradient(Layer& layer) { return layer.history; }
#elif GRADSYNC_EXPECT_FAILURE == 8
    static std::vector<long double>& gradient(Layer& layer) { return layer.sums; }
#else
    static std::vector<float>& gradient(Layer& layer) { return layer.gradients; }
#endif
#if GRADSYNC_EXPECT_FAILURE == 9
    bool requires_grad(Layer&) { return false; }
#else
    static bool requires_grad(Layer&) { return false; }
#endif
#if GRADSYNC_EXPECT_FAILURE == 6
    static std::size_t shape(Layer& layer) { return layer.weights.size(); }
#else
    static std::vector<std::size_t> shape(Layer& layer) { return {layer.weights.size()}; }
#endif
};

void f(Layer& layer) { (void)gradsync::parameter_view(layer); }
