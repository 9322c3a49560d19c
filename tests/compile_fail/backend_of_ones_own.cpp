// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: give this backend a member WorkType all_gather\(ConstBufferView in, BufferView out\)
// expect 2: gradsync: give this backend a member int rank\(\) const
// expect 3: gradsync: give this backend a member WorkType all_reduce\(BufferView, ReduceOp, Contribution = {}\)
// expect 4: gradsync: the first template argument of Reducer is a backend .* a backend of your own needs a member type WorkType
// expect 5: gradsync: give this backend a member void fail\(const std::string&\) noexcept
// expect 6: gradsync: give this backend a member split\(int color, int key\) that returns a backend of the same type
// expect 7: gradsync: give this backend a static constexpr MemorySpace memory_space
// errors: 1
#include <chrono>
#include <string>

#include <gradsync/core/requirements.hpp>

using namespace gradsync;

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Pending {
    bool test();
    void wait();
};

struct Memory {
    void* data() const;
};

struct Base {
#if GRADSYNC_EXPECT_FAILURE != 4
    using WorkType = Pending;
#endif
#if GRADSYNC_EXPECT_FAILURE != 7
    static constexpr MemorySpace memory_space = MemorySpace::host;
#endif
#if GRADSYNC_EXPECT_FAILURE == 2
    int rank();  // not const
#else
    int rank() const;
#endif
    int size() const;
#if GRADSYNC_EXPECT_FAILURE == 3
    void all_reduce(BufferView, ReduceOp, Contribution = {});  // no Work
#else
    Pending all_reduce(BufferView, ReduceOp, Contribution = {});
#endif
    Pending reduce(BufferView, ReduceOp, int, Contribution = {});
    Pending reduce_scatter(ConstBufferView, BufferView, ReduceOp, Contribution = {});
#if GRADSYNC_EXPECT_FAILURE != 1
    Pending all_gather(ConstBufferView, BufferView);
#endif
    Pending broadcast(BufferView, int);
    Pending gather(ConstBufferView, BufferView, int);
    Pending scatter(ConstBufferView, BufferView, int);
    Pending barrier();
    void progress();
    std::chrono::nanoseconds progress_time() const;
#if GRADSYNC_EXPECT_FAILURE == 5
    void fail(const std::string&);
#else
    void fail(const std::string&) noexcept;
#endif
    void set_timeout(std::chrono::nanoseconds);
    std::chrono::nanoseconds timeout() const;
    Memory allocate(std::size_t);
    std::string describe() const;
    Base split(int, int);
    Base duplicate();
};

struct Mine : Base {
#if GRADSYNC_EXPECT_FAILURE != 6
    Mine split(int, int);
#endif
    Mine duplicate();
};

static_assert(require_backend<Mine>());
