// expect: gradsync: use float, double, Float16, BFloat16, or an integer of 1, 4 or 8 bytes
// errors: 1
#include <vector>

#include <gradsync/gradsync.hpp>

#ifdef GRADSYNC_EXPECT_FAILURE
using Element = long double;
#else
using Element = double;
#endif

void f(gradsync::ThreadBackend comm, std::vector<std::vector<Element>>& gradients) {
    gradsync::Reducer<gradsync::ThreadBackend> sync(comm, gradients);
}
