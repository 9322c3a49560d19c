// expect: gradsync: pass a mutable range: the library writes the result into it
// errors: 1
#include <span>
#include <vector>

#include <gradsync/gradsync.hpp>

#ifdef GRADSYNC_EXPECT_FAILURE
using Gradient = std::span<const float>;
#else
using Gradient = std::span<float>;
#endif

void f(gradsync::ThreadBackend comm, std::vector<Gradient>& gradients) {
    gradsync::Reducer<gradsync::ThreadBackend> sync(comm, gradients);
}
