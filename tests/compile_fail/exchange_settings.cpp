// SPDX-License-Identifier: BSL-1.0
// Settings that name the exchange to make for a communicator.
// expect 1: gradsync: make Exchange<B> of these settings constructible from them
// expect 2: gradsync: give this exchange a member std::string describe\(\) const
// expect 3: gradsync: make this exchange copyable
// errors: 1
#include <memory>
#include <string>

#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/core/requirements.hpp>

using namespace gradsync;

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Scaled;

template <class B>
struct ScaledExchange {
#if GRADSYNC_EXPECT_FAILURE != 1
    explicit ScaledExchange(const Scaled&);
#endif
    ScaledExchange(const ScaledExchange&) = delete;  // only the settings are copied

    static constexpr ExchangeTraits traits{};
    template <class>
    using WorkType = typename B::WorkType;
    typename B::WorkType start(B&, std::size_t, BufferView, ReduceOp, Contribution);
    bool is_single_rank(const B&) const;
#if GRADSYNC_EXPECT_FAILURE != 2
    std::string describe() const;
#endif
};

struct Scaled {
    double factor = 1;
#if GRADSYNC_EXPECT_FAILURE == 3
    std::unique_ptr<int> state = {};
#endif
    template <class B>
    using Exchange = ScaledExchange<B>;
};

static_assert(require_exchange<Scaled, ThreadBackend>());
