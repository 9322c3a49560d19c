// expect: gradsync: choose a backend for the memory that these tensors lie in, or stage them through the host
// errors: 1
#include <vector>

#include <gradsync/gradsync.hpp>

struct DeviceBackend : gradsync::ThreadBackend {
    static constexpr auto memory_space = gradsync::MemorySpace::device;
    DeviceBackend split(int color, int key);
    DeviceBackend duplicate();
};
static_assert(gradsync::Backend<DeviceBackend>);

#ifdef GRADSYNC_EXPECT_FAILURE
using Backend = DeviceBackend;
#else
using Backend = gradsync::ThreadBackend;
#endif

void f(Backend comm, std::vector<std::vector<float>*>& gradients) { gradsync::Reducer<Backend> sync(comm, gradients); }
