// ctest: MPI RANKS 1 2 3 4 TIMEOUT 300
// A program of n ranks runs the suite at 1 to n.
#include <algorithm>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "conformance/backend.hpp"
#include "conformance/mpi_launcher.hpp"

using gradsync_test::MpiMachines;
using gradsync_test::MpiMessengers;
using gradsync_test::MpiProcesses;

TEST_CASE("MpiBackend: results") { gradsync_test::check_results<MpiProcesses>(); }
TEST_CASE("MpiBackend: collectives in flight") { gradsync_test::check_in_flight<MpiProcesses>(); }
TEST_CASE("MpiBackend: groups") { gradsync_test::check_groups<MpiProcesses>(); }
TEST_CASE("MpiBackend: failures") { gradsync_test::check_failures<MpiProcesses>(); }

TEST_CASE("MpiBackend by messages: results") { gradsync_test::check_results<MpiMessengers>(); }
TEST_CASE("MpiBackend by messages: collectives in flight") { gradsync_test::check_in_flight<MpiMessengers>(); }
TEST_CASE("MpiBackend by messages: groups") { gradsync_test::check_groups<MpiMessengers>(); }
TEST_CASE("MpiBackend by messages: failures") { gradsync_test::check_failures<MpiMessengers>(); }

TEST_CASE("MpiBackend on two machines: results") { gradsync_test::check_results<MpiMachines>(); }
TEST_CASE("MpiBackend on two machines: collectives in flight") { gradsync_test::check_in_flight<MpiMachines>(); }
TEST_CASE("MpiBackend on two machines: groups") { gradsync_test::check_groups<MpiMachines>(); }
TEST_CASE("MpiBackend on two machines: failures") { gradsync_test::check_failures<MpiMachines>(); }

namespace {

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
        views.push_back({.name = "p" + std::to_string(i),
                         .value = gradsync::buffer(weights[i]),
                         .gradient = storage == gradsync::GradientStorage::borrowed ? gradsync::buffer(gradients[i]) : gradsync::BufferView{}});
    gradsync::Reducer<Backend> sync(comm, views, {.gradients = storage}, gradsync::SizeCappedBuckets(100'000, 4'000));
    sync.broadcast_parameters();
    for (std::size_t step = 0; step < 10; ++step) {
        for (std::size_t i = weights.size(); i-- > 0;) {
            const auto gradient = sync.template gradient<float>(i);
            const std::size_t seed = step * 7 + static_cast<std::size_t>(comm.rank()) * 101 + i;
            for (std::size_t k = 0; k < gradient.size(); ++k) gradient[k] = static_cast<float>((k * 13 + seed) % 997) * 0.01f * weights[i][k];
            sync.mark_ready(i);
        }
        sync.finish();
        sync.clip_gradients_by_norm(1.0);
        for (std::size_t i = 0; i < weights.size(); ++i)
            for (std::size_t k = 0; k < weights[i].size(); ++k) weights[i][k] -= 0.1f * sync.template gradient<float>(i)[k];
    }
    std::vector<float> all;
    for (const auto& w : weights) all.insert(all.end(), w.begin(), w.end());
    return all;
}

}  // namespace

TEST_CASE("MpiBackend: it says how the ranks reach one another, and why not by the faster way") {
    const int size = MpiProcesses::largest;
    const auto described = [&]<class Launcher>(Launcher) {
        std::string description;
        Launcher::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { description = comm.describe(); });
        return description;
    };
    const std::string processes = std::to_string(size) + (size == 1 ? " process" : " processes");
    CHECK(described(MpiProcesses{}) == processes + " that share memory");
    CHECK(described(MpiMessengers{}) == processes + " that send messages (shared memory is switched off)");
    const std::string on_two = processes + " on 2 machines that ";
    if (size == 2) CHECK(described(MpiMachines{}) == on_two + "send messages (one on each machine)");
    if (size == 3) CHECK(described(MpiMachines{}) == on_two + "send messages (machines have different numbers of them)");
    if (size == 4) CHECK(described(MpiMachines{}) == on_two + "share memory on each machine, and send messages between them");
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
        gradsync::MpiBackend backend(MPI_COMM_WORLD, {.reproducible = rank == size - 1});
        FAIL("nothing was thrown");
    } catch (const gradsync::Error& error) {
        CHECK(error.errc() == gradsync::Errc::parameter_mismatch);
        CHECK(error.context().peer == size - 1);
        CHECK(std::string(error.what()) == "MpiBackend: rank " + std::to_string(size - 1) + " has other MpiOptions than rank 0; give all ranks the same");
    }
}

TEST_CASE("MpiBackend: a thread that MPI was not initialised for is told so") {
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
}

TEST_CASE("MpiBackend: a training has the bits that it has on ThreadBackend") {
    using gradsync::GradientStorage;
    const int size = MpiProcesses::largest;
    for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
        std::vector<float> shared, sent;
        MpiProcesses::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { shared = trained(comm, storage); });
        MpiMessengers::run(size, gradsync_test::ample, [&](gradsync::MpiBackend comm) { sent = trained(comm, storage); });
        const auto expected = gradsync::run_threads(size, [&](gradsync::ThreadBackend comm) { return trained(comm, storage); });
        CHECK(shared == expected.front());
        CHECK(sent == expected.front());
    }
}
