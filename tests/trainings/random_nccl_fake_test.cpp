// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync_fake_nccl gradsync_fake_passes COST 30
// The trainings of random_test.cpp in device memory, over the fakes of support/fake, as far as devices have their options. NCCL adds up in
// an order of its own, so the weights are compared with a tolerance.
//
//   GRADSYNC_TRAININGS_SEED=7 GRADSYNC_TRAININGS_RUNS=1 trainings_random_nccl_fake_test
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/cuda/optimizers.hpp>

#include <chrono>
#include <deque>
#include <functional>
#include <thread>

#include "run.hpp"
#include "seeds.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace gradsync_test {

/// gs::cuda::Sgd, and the same in host memory. Weights depend on gradients linearly, so that roundings stay small, and gradients with a
/// wrong factor show.
struct LinearOptimizer : cuda::Sgd {
    int steps = 0;

    LinearOptimizer() : Sgd({.learning_rate = 0.5, .momentum = 0.9, .weight_decay = 0.01}) {}
    void begin_step() { ++steps; }
    using Sgd::step;
    template <class T>
    void step(const OptimizerSlice<T>& s) const {
        const cuda::SgdRule r = rule(s.parameter, s.gradient_scale);
        for (std::size_t k = 0; k < s.value.size(); ++k) {
            T& m = s.state[0][k];
            m = T(r.momentum) * m + s.gradient[k] * T(r.gradient_scale) + T(r.decay) * s.value[k];
            s.value[k] -= T(r.rate) * m;
        }
    }
};

/// Kernels run on a stream, later than the host puts them there. Now and then they take longer, or there is a new stream, and the old one
/// ends. The fakes' device memory is the host's.
template <class B>
class FakeKernels {
public:
    using Optimizer = LinearOptimizer;

    FakeKernels(B& comm, const DrawnTraining& t) : comm_(comm), t_(t) { comm_.set_stream(stream_.get()); }
    FakeKernels& operator=(FakeKernels&&) = delete;
    ~FakeKernels() {
        finish();
        comm_.set_stream(nullptr);
    }

    /// The trainer's memory.
    void use(const BufferView& view) {
        if (view.bytes() != 0) lent_.emplace_back(view.data, view.bytes());
    }
    void run(std::function<void()> kernel) { gradsync_fake::enqueue(stream_.get(), std::move(kernel)); }
    void finish() { cuda::check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }
    void disturb(int step, int place, bool in_flight) {
        const auto chance = [&](int what) { return t_.draw(12, what, step, place, comm_.rank()) == 0; };
        if (chance(31)) run([] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
        const bool shared = in_flight && (t_.threads || (!t_.forward && t_.overlap == 2));  // another thread may be putting work on it
        if (shared || !chance(32)) return;
        cuda::Stream other = cuda::make_stream();
        cuda::order(stream_.get(), other.get(), cuda::make_event());
        comm_.set_stream(other.get());
        stream_ = std::move(other);
    }

private:
    B comm_;
    const DrawnTraining& t_;
    cuda::Stream stream_ = cuda::make_stream();
    std::deque<gradsync_fake::OnDevice> lent_;
};

}  // namespace gradsync_test

namespace {

std::vector<Trained> over_nccl(const DrawnTraining& t, const Leg& leg) {
    std::vector<Trained> ranks(static_cast<std::size_t>(t.ranks));
    const NcclOptions options{.timeout = time_limit, .memory = NcclMemory(t.draw(3, 33, 0)), .group_bytes = t.draw(3, 34, 0) * 4096};
    run_rank_threads(
        t.ranks, [&](auto& rendezvous) { return NcclBackend(rendezvous, options); },
        [&](NcclBackend comm) { ranks[static_cast<std::size_t>(comm.rank())] = run_rank<FakeKernels>(comm, t, leg); });
    if (gradsync_fake::misuses() != 0) throw std::logic_error("a misuse of NCCL");
    return ranks;
}

std::vector<Trained> staged(const DrawnTraining& t, const Leg& leg) {
    std::vector<Trained> ranks(static_cast<std::size_t>(t.ranks));
    const auto train = [&](ThreadBackend host) {
        const StagingOptions options{.piece_bytes = std::size_t{64} << t.draw(12, 35, 0)};
        ranks[static_cast<std::size_t>(host.rank())] = run_rank<FakeKernels>(StagingBackend<ThreadBackend>(host, options), t, leg);
    };
    run_threads(t.ranks, train, ThreadOptions{.timeout = time_limit});
    return ranks;
}

}  // namespace

TEST_CASE("trainings drawn at random over NCCL are those in one process") {
    const auto run = [](const DrawnTraining& t, const Leg& leg) { return leg.first == leg.last ? staged(t, leg) : over_nccl(t, leg); };
    check_trainings(
        number_of_cases(100), [&](const DrawnTraining& t) { return run_legs<LinearOptimizer>(t, run); }, true);
}
TEST_CASE("trainings drawn at random, staged through the host, are those in one process") {
    const auto run = [](const DrawnTraining& t, const Leg& leg) { return leg.first == leg.last ? over_nccl(t, leg) : staged(t, leg); };
    check_trainings(
        number_of_cases(100), [&](const DrawnTraining& t) { return run_legs<LinearOptimizer>(t, run); }, true);
}
