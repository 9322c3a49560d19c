// expect: gradsync: specialise gradsync::parameter_traits for this type, with a public static function gradient
// errors: 1
#include <vector>

#include <gradsync/gradsync.hpp>

struct Layer {
    std::vector<float> weights, gradients;
};

#ifndef GRADSYNC_EXPECT_FAILURE
template <>
struct gradsync::parameter_traits<Layer> {
    static std::vector<float>& gradient(Layer& layer) { return layer.gradients; }
};
#endif

void f(gradsync::ThreadBackend comm, std::vector<Layer>& layers) {
    gradsync::Reducer<gradsync::ThreadBackend> sync(comm, layers);
}
