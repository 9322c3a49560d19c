// expect: gradsync: pass a mutable range: the library writes the result into it
// errors: 1
#include <span>
#include <vector>

#include <gradsync/gradsync.hpp>

#ifdef GRADSYNC_EXPECT_FAILURE
using Gradients = const std::vector<std::vector<float>>;
#else
using Gradients = const std::vector<std::span<float>>;
#endif

void f(gradsync::ThreadBackend comm, Gradients& gradients) {
    gradsync::Reducer<gradsync::ThreadBackend> sync(comm, gradients);
}
