// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 1 2 4 TIMEOUT 900 COST 40
// A program of n ranks runs the suite at n, and that of 4 also at 3.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "conformance/backend.hpp"
#include "conformance/mpi_launcher.hpp"

using gradsync_test::MpiInTurns;
using gradsync_test::MpiMachines;
using gradsync_test::MpiMessengers;
using gradsync_test::MpiProcesses;

TEST_CASE("MpiBackend gives the results of the oracle") { gradsync_test::check_results<MpiProcesses>(); }
TEST_CASE("MpiBackend keeps collectives in flight") { gradsync_test::check_in_flight<MpiProcesses>(); }
TEST_CASE("MpiBackend splits into groups") { gradsync_test::check_groups<MpiProcesses>(); }
TEST_CASE("MpiBackend reports failures on every rank") { gradsync_test::check_failures<MpiProcesses>(); }
TEST_CASE("MpiBackend has the abilities that it states") { gradsync_test::check_abilities<MpiProcesses>(); }

TEST_CASE("MpiBackend by messages gives the results of the oracle") { gradsync_test::check_results<MpiMessengers>(); }
TEST_CASE("MpiBackend by messages keeps collectives in flight") { gradsync_test::check_in_flight<MpiMessengers>(); }
TEST_CASE("MpiBackend by messages splits into groups") { gradsync_test::check_groups<MpiMessengers>(); }
TEST_CASE("MpiBackend by messages reports failures on every rank") { gradsync_test::check_failures<MpiMessengers>(); }
TEST_CASE("MpiBackend by messages has the abilities that it states") { gradsync_test::check_abilities<MpiMessengers>(); }

TEST_CASE("MpiBackend on two machines gives the results of the oracle") { gradsync_test::check_results<MpiMachines>(); }
TEST_CASE("MpiBackend on two machines keeps collectives in flight") { gradsync_test::check_in_flight<MpiMachines>(); }
TEST_CASE("MpiBackend on two machines splits into groups") { gradsync_test::check_groups<MpiMachines>(); }
TEST_CASE("MpiBackend on two machines reports failures on every rank") { gradsync_test::check_failures<MpiMachines>(); }
TEST_CASE("MpiBackend on two machines has the abilities that it states") { gradsync_test::check_abilities<MpiMachines>(); }

TEST_CASE("MpiBackend on two machines in turns gives the results of the oracle") { gradsync_test::check_results<MpiInTurns>(); }

namespace {

void write_gradient(std::span<float> gradient, std::span<const float> weights, std::size_t step, int rank, std::size_t i) {
    const std::size_t seed = step * 7 + static_cast<std::size_t>(rank) * 101 + i;
    for (std::size_t k = 0; k < gradient.size(); ++k) gradient[k] = static_cast<float>((k * 13 + seed) % 997) * 0.01f * weights[k];
}

/// Some steps of a made-up training; all weights afterwards.
template <class Backend>
std::vector<float> trained(Backend comm, gradsync::GradientStorage storage) {
    std::vector<std::vector<float>> weights, gradients;
    std::vector<gradsync::ParameterView> views;
    for (std::size_t i = 0; i < 12; ++i) {
        weights.emplace_back(i * i * 300 + 7, 0.5f);
        gradients.emplace_back(weights.back().size());
    }
    for (std::size_t i = 0; i < weights.size(); ++i)
        views.push_back(
            {.name = "p" + std::to_string(i),
             .value = gradsync::buffer(weights[i]),
             .gradient = storage == gradsync::GradientStorage::borrowed ? gradsync::buffer(gradients[i]) : gradsync::BufferView{}});
    gradsync::Reducer<Backend> sync(comm, views, {.gradients = storage}, gradsync::SizeCappedBuckets(100'000, 4'000));
    sync.broadcast_parameters();
    for (std::size_t step = 0; step < 10; ++step) {
        for (std::size_t i = weights.size(); i-- > 0;) {
            write_gradient(sync.gradient_view(i).template as<float>(), weights[i], step, comm.rank(), i);
            sync.mark_ready(i);
        }
        sync.finish();
        sync.clip_gradients_by_norm(1.0);
        for (std::size_t i = 0; i < weights.size(); ++i)
            for (std::size_t k = 0; k < weights[i].size(); ++k) weights[i][k] -= 0.1f * sync.gradient_view(i).template as<float>()[k];
    }
    std::vector<float> all;
    for (const auto& w : weights) all.insert(all.end(), w.begin(), w.end());
    return all;
}

/// The optimizer of `trained`.
struct Descent {
    static constexpr std::size_t state_count() { return 0; }
    void begin_step() {}
    void step(const gradsync::OptimizerSlice<float>& s) const {
        for (std::size_t k = 0; k < s.value.size(); ++k) s.value[k] -= 0.1f * (s.gradient[k] * static_cast<float>(s.gradient_scale));
    }
};

/// The same training with shards; `Sharded` makes one of (comm, views). `use(sharded, i)` keeps parameter i's weights where they are.
template <class Backend, class Make, class Use>
std::vector<float> trained_sharded(Backend comm, Make&& make, Use&& use) {
    std::vector<std::vector<float>> weights;
    for (std::size_t i = 0; i < 12; ++i) weights.emplace_back(i * i * 300 + 7, 0.5f);
    std::vector<gradsync::ParameterView> views;
    for (std::size_t i = 0; i < weights.size(); ++i)
        views.push_back({.name = "p" + std::to_string(i), .value = gradsync::buffer(weights[i])});
    auto sharded = make(comm, views);
    sharded->broadcast_parameters();
    const auto value = [&](std::size_t i) {
        const gradsync::ConstBufferView view = sharded->parameter_value(i);
        return std::span(static_cast<const float*>(view.data), view.count);
    };
    for (std::size_t step = 0; step < 10; ++step) {
        for (std::size_t i = 0; i < weights.size(); ++i) [[maybe_unused]]
            const auto forward = use(*sharded, i);
        for (std::size_t i = weights.size(); i-- > 0;) {
            [[maybe_unused]] const auto backward = use(*sharded, i);
            write_gradient(sharded->acquire_gradient(i).template as<float>(), value(i), step, comm.rank(), i);
            sharded->mark_ready(i);
        }
        sharded->finish();
        sharded->step(gradsync::clip_factor(sharded->gradient_norm(), 1.0));
    }
    std::vector<float> all;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        [[maybe_unused]] const auto last = use(*sharded, i);
        all.insert(all.end(), value(i).begin(), value(i).end());
    }
    return all;
}

template <class Backend>
std::vector<float> trained_in_stage(Backend comm, int stage) {
    using namespace gradsync;
    const auto in_buckets = [](auto&& comm_, auto& views, auto type) {
        using Sharded = typename decltype(type)::type;
        const auto gradients = Sharded::stage_pools ? GradientStorage::automatic : GradientStorage::in_buckets;
        return std::make_unique<Sharded>(comm_, views, Descent{}, ShardingOptions{{.gradients = gradients}, ParameterStorage::in_buckets},
                                         SizeCappedBuckets(100'000, 4'000));
    };
    const auto wait = [](auto& sharded, std::size_t i) { return sharded.wait_parameter(i), 0; };
    if (stage == 1)
        return trained_sharded(
            comm,
            [&](Backend c, auto& views) {
                return in_buckets(c, views,
                                  std::type_identity<ShardedOptimizer<Backend, Descent, Zero1, SizeCappedBuckets, OverlapForward>>{});
            },
            wait);
    if (stage == 2)
        return trained_sharded(
            comm,
            [&](Backend c, auto& views) { return in_buckets(c, views, std::type_identity<ShardedOptimizer<Backend, Descent, Zero2>>{}); },
            wait);
    return trained_sharded(
        comm,
        [](Backend c, auto& views) {
            return std::make_unique<ShardedParameters<Backend, Descent>>(c, views, Descent{}, Units({0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8}));
        },
        [](auto& sharded, std::size_t i) { return sharded.gather(sharded.unit_of(i)); });
}

}  // namespace

TEST_CASE("MpiBackend: describe() says how the ranks reach one another, and why not in the faster way") {
    const int size = MpiProcesses::largest;
    const auto described = [&]<class Launcher>(Launcher) {
        std::string description;
        Launcher::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { description = comm.describe(); });
        return description;
    };
    if (size == 1) {
        CHECK(described(MpiProcesses{}) == "1 process");
        return;
    }
    const std::string processes = std::to_string(size) + " processes";
    CHECK(described(MpiProcesses{}) == processes + " that share memory");
    CHECK(described(MpiMessengers{}) == processes + " that send messages (shared memory is switched off)");
    const std::string on_two = processes + " on 2 machines that ";
    if (size == 2) CHECK(described(MpiMachines{}) == on_two + "send messages (one on each machine)");
    if (size == 3) CHECK(described(MpiMachines{}) == on_two + "share memory on each machine, and send messages between them");
    if (size == 4) CHECK(described(MpiMachines{}) == on_two + "share memory on each machine, and send messages between them");
    if (size >= 3)
        CHECK(described(MpiInTurns{}) ==
              on_two + "send messages (ranks of a machine cannot reduce first; number ranks machine by machine, a power of two on each)");
}

TEST_CASE("MpiBackend: a mean of 16-bit numbers does not overflow on the way, whatever its weights") {
    MpiMachines::run(MpiProcesses::largest, gradsync_test::ample, [&](gradsync::MpiBackend comm) {
        for (const double weight : {1.0, 4096.0}) {
            std::vector<gradsync::Float16> values(1000, gradsync::Float16(40000.0f));
            comm.all_reduce(gradsync::buffer(values), gradsync::ReduceOp::mean, {weight, weight}).wait();
            CHECK(std::all_of(values.begin(), values.end(), [](gradsync::Float16 x) { return static_cast<float>(x) == 40000.0f; }));
        }
    });
}

TEST_CASE("MpiBackend: options that differ are refused on every rank") {
    const int size = MpiProcesses::largest, rank = gradsync_test::environment().rank;
    if (size == 1) return;
    try {
        gradsync::MpiBackend backend(MPI_COMM_WORLD, {.shared_memory = rank != size - 1});
        FAIL("nothing was thrown");
    } catch (const gradsync::Error& error) {
        CHECK(error.errc() == gradsync::Errc::parameter_mismatch);
        CHECK(error.context().peer == size - 1);
        CHECK(std::string(error.what()) ==
              "MpiBackend: rank " + std::to_string(size - 1) + " has other MpiOptions than rank 0; give all ranks the same");
    }
}

TEST_CASE("MpiBackend frees a communicator that it duplicated or took, and leaves one that it borrowed") {
    using gradsync::MpiCommunicator;
    const int size = MpiProcesses::largest;
    for (const bool shared_memory : {true, false})
        for (const MpiCommunicator kind : {MpiCommunicator::duplicate, MpiCommunicator::attach, MpiCommunicator::take_ownership}) {
            MPI_Comm comm = MPI_COMM_NULL;
            MPI_Comm_dup(MPI_COMM_WORLD, &comm);
            // It tells when it, or a duplicate, is freed.
            static int freed = 0;
            int key = MPI_KEYVAL_INVALID;
            MPI_Comm_create_keyval(
                MPI_COMM_DUP_FN, [](MPI_Comm, int, void*, void*) { return ++freed, static_cast<int>(MPI_SUCCESS); }, &key, nullptr);
            MPI_Comm_set_attr(comm, key, nullptr);
            freed = 0;
            const int expected = kind == MpiCommunicator::attach ? 0 : kind == MpiCommunicator::duplicate && !shared_memory ? 2 : 1;
            {
                gradsync::MpiBackend backend(comm, {.timeout = gradsync_test::ample, .shared_memory = shared_memory}, kind);
                if (kind == MpiCommunicator::duplicate) MPI_Comm_free(&comm);
                std::vector<float> ones(1000, 1.0f);
                backend.all_reduce(gradsync::buffer(ones), gradsync::ReduceOp::sum).wait();
                CHECK(ones == std::vector<float>(1000, static_cast<float>(size)));
                if (kind == MpiCommunicator::attach) CHECK(freed == 0);
            }
            // A world whose handles are gone goes when its messages are over and another one is made.
            for (int more = 0, everywhere = -1; more < 1000 && (everywhere < expected || more < 5); ++more) {
                MpiMessengers::run(size, gradsync_test::ample, [](gradsync::MpiBackend) {});
                MPI_Allreduce(&freed, &everywhere, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
            }
            CHECK(freed == expected);
            if (kind == MpiCommunicator::attach)
                CHECK_THROWS_WITH_AS(gradsync::MpiBackend(comm, {.shared_memory = shared_memory}, kind),
                                     doctest::Contains("another backend had this communicator before"), gradsync::Error);
            MPI_Comm_free_keyval(&key);
        }
}

TEST_CASE("MpiBackend refuses to take a communicator that must not be freed, and a wait without a limit") {
    CHECK_THROWS_WITH_AS(gradsync::MpiBackend(MPI_COMM_WORLD, {}, gradsync::MpiCommunicator::take_ownership),
                         doctest::Contains("cannot be taken; let the backend attach or duplicate"), gradsync::Error);
    CHECK_THROWS_WITH_AS(gradsync::MpiBackend(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(0)}), doctest::Contains("must be positive"),
                         gradsync::Error);
}

TEST_CASE("MpiBackend and MpiRendezvous throw for MPI_COMM_NULL instead of letting MPI end the process") {
    const auto attempt = [](auto&& make) {
        try {
            make();
            FAIL("nothing was thrown");
        } catch (const gradsync::Error& error) {
            CHECK(error.errc() == gradsync::Errc::invalid_argument);
            CHECK(std::string(error.what()).find("rendezvous over MPI: MPI_COMM_NULL has no ranks; make no backend") == 0);
        }
    };
    attempt([] { gradsync::MpiBackend{MPI_COMM_NULL}; });
    attempt([] { gradsync::MpiBackend(MPI_COMM_NULL, {}, gradsync::MpiCommunicator::take_ownership); });
    attempt([] { gradsync::MpiRendezvous{MPI_COMM_NULL}; });
}

TEST_CASE("MpiBackend: ranks that wait for some that do not come name them at the time limit") {
    const auto& world = gradsync_test::environment();
    if (world.size == 1) return;
    // Of four, two do not come. The others come one after another.
    const std::vector<int> missing = world.size == 4 ? std::vector{0, 2} : std::vector{0};
    const bool comes = std::find(missing.begin(), missing.end(), world.rank) == missing.end();
    MPI_Comm comm = MPI_COMM_NULL;  // good for nothing else afterwards, so it is not freed
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    const auto attempt = [&](const std::string& expected) {
        try {
            const gradsync::MpiBackend backend(comm, {.timeout = std::chrono::seconds(1)});
            FAIL("nothing was thrown");
        } catch (const gradsync::Error& error) {
            CHECK(error.errc() == gradsync::Errc::timeout);
            CHECK((error.context().peer >= 0) == (std::string(error.what()).find(" for rank") != std::string::npos));
            CHECK(std::string(error.what()).find(expected) != std::string::npos);
        }
    };
    if (comes) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30 * world.rank));
        attempt(missing.size() == 1 ? " for rank 0;" : " for ranks 0, 2;");
    }
    gradsync_test::MpiEnvironment::meet();
    if (!comes) attempt(" for ");  // too late: those that came have given up, in the first call or before it was over for them
    gradsync_test::MpiEnvironment::meet();
}

TEST_CASE("MpiBackend: a rank that comes late, but within the limit, is waited for") {
    const auto& world = gradsync_test::environment();
    if (world.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    MpiMessengers::run(world.size, gradsync_test::ample, [](gradsync::MpiBackend comm) { comm.barrier().wait(); });
}

TEST_CASE("MpiBackend: a call on a thread that MPI was not initialised for throws and says so") {
    int level = 0;
    MPI_Query_thread(&level);
    REQUIRE(level == MPI_THREAD_SINGLE);  // see MpiEnvironment
    MpiMessengers::run(MpiProcesses::largest, gradsync_test::ample, [&](gradsync::MpiBackend comm) {
        std::string caught;
        std::thread([&] {
            try {
                comm.barrier().wait();
            } catch (const gradsync::Error& error) {
                caught = error.what();
            }
            comm.progress();
        }).join();
        CHECK(caught.find("barrier: MPI was initialised for the main thread alone") == 0);
        comm.barrier().wait();
    });
    std::string caught;
    std::thread([&] {
        try {
            const gradsync::MpiBackend comm(MPI_COMM_SELF);
        } catch (const gradsync::Error& error) {
            caught = error.what();
        }
    }).join();
    CHECK(caught.find("MPI was initialised for the main thread alone") != std::string::npos);
}

TEST_CASE("MpiBackend: a training has the bits that it has on ThreadBackend") {
    using gradsync::GradientStorage;
    const int size = MpiProcesses::largest;
    for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
        std::vector<float> shared, sent, both;
        MpiProcesses::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { shared = trained(comm, storage); });
        MpiMessengers::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { sent = trained(comm, storage); });
        MpiMachines::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { both = trained(comm, storage); });
        const auto expected = gradsync::run_threads(size, [&](gradsync::ThreadBackend comm) { return trained(comm, storage); });
        CHECK(shared == expected.front());
        CHECK(sent == expected.front());
        CHECK(both == expected.front());
    }
}

TEST_CASE("MpiBackend: sharded trainings have the bits of whole ones on ThreadBackend") {
    const int size = MpiProcesses::largest;
    const auto expected =
        gradsync::run_threads(size, [&](gradsync::ThreadBackend comm) { return trained(comm, gradsync::GradientStorage::in_buckets); });
    for (const int stage : {1, 2, 3}) {
        CAPTURE(stage);
        std::vector<float> shared, sent, both;
        MpiProcesses::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { shared = trained_in_stage(comm, stage); });
        MpiMachines::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { both = trained_in_stage(comm, stage); });
        MpiMessengers::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { sent = trained_in_stage(comm, stage); });
        CHECK(shared == expected.front());
        CHECK(sent == expected.front());
        CHECK(both == expected.front());
    }
}
