// expect: gradsync: the first argument of Reducer is a backend
#include <vector>

#include <gradsync/gradsync.hpp>

void f(gradsync::ThreadBackend comm, std::vector<std::vector<float>>& gradients) {
#ifdef GRADSYNC_EXPECT_FAILURE
    (void)comm;
    gradsync::Reducer<int> sync(0, gradients);
#else
    gradsync::Reducer<gradsync::ThreadBackend> sync(comm, gradients);
#endif
}
