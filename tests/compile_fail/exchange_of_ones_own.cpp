// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: the fourth template argument of Reducer is an exchange \(AllReduce, PowerSgd, ...\): .* an exchange of your own needs a member template WorkType<B>
// expect 2: gradsync: give this exchange a member static constexpr gradsync::ExchangeTraits traits
// expect 3: gradsync: give this exchange a member WorkType<B> start\(
// expect 4: gradsync: give this exchange a member bool is_single_rank\(const B& backend\) const
// expect 5: gradsync: give this exchange a member std::string describe\(\) const
// expect 6: gradsync: make this exchange copyable
// expect 7: gradsync: this exchange's traits say adopts_plan: give it a member void adopt_plan\(
// expect 8: gradsync: this exchange's traits say reports_traffic: give it a member gradsync::Traffic traffic\(
// expect 9: gradsync: this exchange's traits say reports_progress_time: give it a member std::chrono::nanoseconds progress_time\(\) const
// expect 10: gradsync: this exchange has a member adopt_plan, traffic or progress_time that its traits do not mention
// expect 11: gradsync: make this exchange's WorkType a Work
// errors: 1
#include <memory>
#include <span>
#include <string>

#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/core/requirements.hpp>

using namespace gradsync;

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Groups {
#if GRADSYNC_EXPECT_FAILURE == 2
    static constexpr bool scatters = true;
#else
    static constexpr ExchangeTraits traits{
        .scatters = true, .adopts_plan = true, .reports_traffic = GRADSYNC_EXPECT_FAILURE != 10, .reports_progress_time = true};
#endif
#if GRADSYNC_EXPECT_FAILURE == 1
    using WorkType = ThreadWork;  // not a template
#elif GRADSYNC_EXPECT_FAILURE == 11
    template <class>
    using WorkType = std::unique_ptr<ThreadWork>;
#else
    template <class B>
    using WorkType = typename B::WorkType;
#endif
#if GRADSYNC_EXPECT_FAILURE == 3
    ThreadWork start(ThreadBackend&, BufferView, ReduceOp, Contribution);  // no number of the bucket
#else
    ThreadWork start(ThreadBackend&, std::size_t, BufferView, ReduceOp, Contribution);
#endif
#if GRADSYNC_EXPECT_FAILURE == 4
    bool is_single_rank(ThreadBackend&) const;  // not of a const one
#else
    bool is_single_rank(const ThreadBackend&) const;
#endif
#if GRADSYNC_EXPECT_FAILURE != 5
    std::string describe() const;
#endif
#if GRADSYNC_EXPECT_FAILURE != 7
    void adopt_plan(ThreadBackend&, std::span<const BucketContents>);
#endif
#if GRADSYNC_EXPECT_FAILURE == 8
    std::size_t traffic(const ThreadBackend&, std::size_t, BufferView) const;  // no Traffic
#else
    Traffic traffic(const ThreadBackend&, std::size_t, BufferView) const;
#endif
#if GRADSYNC_EXPECT_FAILURE == 9
    std::chrono::nanoseconds progress_time();  // not const
#else
    std::chrono::nanoseconds progress_time() const;
#endif
#if GRADSYNC_EXPECT_FAILURE == 6
    std::unique_ptr<int> state;
#else
    int state;
#endif
};

static_assert(require_exchange<Groups, ThreadBackend>());
