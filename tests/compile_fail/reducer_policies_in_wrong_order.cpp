// expect: gradsync: the second argument of Reducer is a bucket policy
#include <vector>

#include <gradsync/gradsync.hpp>

using gradsync::Flat, gradsync::OverlapBackward, gradsync::ThreadBackend;

void f(ThreadBackend comm, std::vector<std::vector<float>>& gradients) {
#ifdef GRADSYNC_EXPECT_FAILURE
    gradsync::Reducer<ThreadBackend, OverlapBackward, Flat> sync(comm, gradients);
#else
    gradsync::Reducer<ThreadBackend, Flat, OverlapBackward> sync(comm, gradients);
#endif
}
