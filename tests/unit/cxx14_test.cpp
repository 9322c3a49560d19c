// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync::cxx14
// The facade for programs in C++14: each function, and what its errors say. examples/adopt/cxx14.cpp is compiled as C++14.
#include <gradsync/cxx14.hpp>

#ifdef GRADSYNC_VERSION_MAJOR
#error "cxx14.hpp includes a header of C++20"
#endif

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/forked.hpp"
#include "support/ports.hpp"

using namespace gradsync_test;
using gradsync::cxx14::Communicator;
using gradsync::cxx14::Errc;
using gradsync::cxx14::Error;
using gradsync::cxx14::parameter;
using gradsync::cxx14::Reducer;

namespace {

/// Runs `f(comm)`, which returns what is wrong, on processes.
template <class F>
std::vector<Report> on_processes(int size, double limit, F&& f) {
    const std::string port = std::to_string(free_port());
    return forked(size, [&](int rank) {
        ::setenv("RANK", std::to_string(rank).c_str(), 1);
        ::setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
        ::setenv("MASTER_ADDR", "localhost", 1);
        ::setenv("MASTER_PORT", port.c_str(), 1);
        return std::string(f(Communicator::from_environment(limit)));
    });
}

/// The Error of `f`, as "code rank peer: text"; otherwise "".
template <class F>
std::string error_of(F&& f) {
    try {
        f();
    } catch (const Error& e) {
        return std::to_string(static_cast<int>(e.errc())) + " " + std::to_string(e.rank()) + " " + std::to_string(e.peer()) + ": " +
               e.what();
    }
    return "";
}

std::string prefix(Errc code, int rank, int peer) {
    return std::to_string(static_cast<int>(code)) + " " + std::to_string(rank) + " " + std::to_string(peer) + ": ";
}

}  // namespace

TEST_CASE("cxx14: a communicator has collectives of all element types that a pointer can say, and of one that it cannot") {
    for (const Report& report : on_processes(3, 60, [](Communicator comm) {
             const int r = comm.rank();
             if (comm.size() != 3) return "another size";
             float f[] = {static_cast<float>(r), 1};
             double d = r + 1;
             std::int32_t i = r;
             std::int64_t l = 10 + r;
             std::uint16_t half = r == 1 ? 0x3f80 : 0;  // 1 in bf16
             comm.average(f, 2);
             comm.sum(&d, 1);
             comm.sum(&i, 1);
             comm.broadcast(&l, 1, 2);
             comm.sum(&half, 1, gradsync::cxx14::DType::bf16);
             if (f[0] != 1 || f[1] != 1) return "another mean";
             if (d != 6 || i != 3 || half != 0x3f80) return "another sum";
             return l == 12 ? "" : "another rank's elements";
         }))
        CHECK(report.text == "");
}

TEST_CASE("cxx14: a Reducer takes every option") {
    for (const bool sum : {false, true})
        for (const bool overlap : {false, true})
            for (const Report& report : on_processes(2, 60, [&](Communicator comm) {
                     const auto r = static_cast<float>(comm.rank());
                     std::vector<float> w(50, r + 5), gw(50);
                     double b = r, gb = 0;
                     gradsync::cxx14::Options options;
                     options.bucket_bytes = options.first_bucket_bytes = 64;
                     options.overlap = overlap;
                     options.sum = sum;
                     Reducer sync(comm, {parameter("w", w.data(), gw.data(), w.size()), parameter("b", &b, &gb, 1)}, options);
                     sync.broadcast_parameters(1);
                     if (w[49] != 6 || b != 1) return "other weights";
                     for (int step = 0; step < 3; ++step) {
                         if (!sync.begin_step(true)) return "no rank has a batch";
                         gb = step + comm.rank();
                         sync.mark_ready(1);
                         gw.assign(50, 2 * r);
                         sync.mark_ready(0);
                         sync.finish();
                         if (gw[49] != (sum ? 2 : 1) || gb != (sum ? 2 * step + 1 : step + 0.5)) return "another average";
                     }
                     if (sync.begin_step(comm.rank() == 0) != true) return "rank 0 has a batch";
                     if (comm.rank() == 0) gw.assign(50, 3), gb = 0, sync.mark_ready(0), sync.mark_ready(1);
                     sync.finish();
                     if (gw[0] != 3) return "a rank without a batch counts";
                     const double norm = sync.clip_gradients_by_norm(1);
                     return norm * norm > 449.9 && norm * norm < 450.1 && gw[0] < 0.15f ? "" : "another norm";
                 }))
                CHECK(report.text == "");
}

TEST_CASE("cxx14: errors name the rank that throws and the rank that is to blame") {
    const auto reports = on_processes(2, 60, [](Communicator comm) {
        float w[2] = {}, g[2] = {};
        Reducer sync(comm, {parameter("w", w, g, 2)});
        const std::string refused = error_of([&] { sync.mark_ready(7); });
        if (refused.rfind(prefix(Errc::invalid_argument, comm.rank(), -1), 0) != 0) return "an index out of range: " + refused;
        if (comm.rank() == 1) {
            comm.fail("no more data");
            return std::string();
        }
        return error_of([&] {
            sync.mark_ready(0);
            sync.finish();
        });
    });
    INFO(reports[0].text);
    CHECK(reports[0].text.rfind(prefix(Errc::peer_failed, 0, 1), 0) == 0);
    CHECK(reports[0].says("no more data"));
    CHECK(reports[1].text == "");
}

TEST_CASE("cxx14: a rank that stays away is named after the time limit; limits are positive") {
    const auto reports = on_processes(2, 60, [](Communicator comm) {
        for (const double limit : {0.0, -1.0, static_cast<double>(__builtin_nanf(""))})
            if (error_of([&] { comm.set_timeout(limit); }).rfind(prefix(Errc::invalid_argument, -1, -1), 0) != 0)
                return std::string("a limit");
        comm.set_timeout(1e300);  // for ever, nearly
        float x = 1;
        comm.sum(&x, 1);
        if (comm.rank() == 1) {
            ::usleep(2000000);
            return std::string();
        }
        comm.set_timeout(0.3);
        return error_of([&] { comm.sum(&x, 1); });
    });
    INFO(reports[0].text);
    CHECK(reports[0].text.rfind(prefix(Errc::timeout, 0, 1), 0) == 0);
}

TEST_CASE("cxx14: parameters that differ are named on every rank") {
    for (const Report& report : on_processes(2, 60, [](Communicator comm) {
             float w[3] = {}, g[3] = {};
             return error_of([&] { Reducer(comm, {parameter(comm.rank() == 0 ? "w" : "v", w, g, 3)}); });
         })) {
        INFO(report.text);
        CHECK(report.says(std::to_string(static_cast<int>(Errc::parameter_mismatch)) + " "));
    }
}

TEST_CASE("cxx14: moving a Communicator copies it, and both are the same rank") {
    for (const Report& report : on_processes(2, 60, [](Communicator comm) {
             Communicator moved = std::move(comm);
             comm = std::move(moved);
             moved.set_timeout(30);
             float x = 1;
             comm.sum(&x, 1);
             moved.sum(&x, 1);
             float w[1] = {}, g[1] = {};
             Reducer(moved, {parameter("w", w, g, 1)}).broadcast_parameters();
             return x == 4 && moved.rank() == comm.rank() && moved.size() == 2 ? "" : "another sum";
         }))
        CHECK(report.text == "");
}

TEST_CASE("cxx14: null pointers with a count, and a number that is no element type, are refused; the communicator still works") {
    for (const int ranks : {1, 2})
        for (const Report& report : on_processes(ranks, 60, [](Communicator comm) {
                 float x[1] = {1}, w[3] = {};
                 const auto no_type = static_cast<gradsync::cxx14::DType>(77);
                 const std::string errors[] = {
                     error_of([&] { Reducer(comm, nullptr, 3); }),
                     error_of([&] { comm.sum(static_cast<float*>(nullptr), 3); }),
                     error_of([&] { comm.broadcast(static_cast<float*>(nullptr), 3); }),
                     error_of([&] { comm.average(x, 1, no_type); }),
                     error_of([&] { comm.sum(x, 1, no_type); }),
                     error_of([&] { comm.broadcast(x, 1, no_type); }),
                     error_of([&] {
                         Reducer(comm, {gradsync::cxx14::Parameter{"w", w, w, 3, no_type}});
                     }),
                     error_of([&] {
                         Reducer(comm, {gradsync::cxx14::Parameter{"w", nullptr, w, 3, no_type}});
                     }),
                 };
                 const std::string words[] = {"the array of 3 parameters is a null pointer; pass its address", "has no memory",
                                              "has no memory", "DType(77) is not an element type; pass one that DType names"};
                 for (std::size_t k = 0; k < 8; ++k)
                     if (errors[k].rfind(std::to_string(static_cast<int>(Errc::invalid_argument)) + " ", 0) != 0 ||
                         errors[k].find(words[k < 3 ? k : 3]) == std::string::npos)
                         return std::to_string(k) + ": " + errors[k];
                 comm.sum(x, 1);
                 return std::string(x[0] == static_cast<float>(comm.size()) ? "" : "another sum");
             }))
            CHECK(report.text == "");
}

TEST_CASE("cxx14: fail() without a reason") {
    const auto reports = on_processes(2, 60, [](Communicator comm) {
        if (comm.rank() == 1) return comm.fail(nullptr), std::string();
        float x = 1;
        return error_of([&] { comm.sum(&x, 1); });
    });
    INFO(reports[0].text);
    CHECK(reports[0].text.rfind(prefix(Errc::peer_failed, 0, 1), 0) == 0);
    CHECK(reports[0].says("rank 1 failed: it gave no reason"));
    CHECK(reports[1].text == "");
}

TEST_CASE("cxx14: errors recommend only what this interface has, on the rank that throws and on the others") {
    struct Mistake {
        const char* says;
        std::string (*make)(Communicator);
        int ranks = 1;
    };
    static float w[2], g[2];
    static const auto refusal = [](Communicator comm, std::vector<gradsync::cxx14::Parameter> parameters) {
        return error_of([&] { Reducer(comm, parameters); });
    };
    static const auto marks = [](Communicator comm, int on_rank, std::size_t times) {
        Reducer sync(comm, {parameter("w", w, g, 2)});
        return error_of([&] {
            if (comm.rank() == on_rank)
                for (std::size_t k = 0; k < times; ++k) sync.mark_ready(0);
            else sync.mark_ready(0);
            sync.finish();
        });
    };
    const Mistake mistakes[] = {
        {"has no gradient memory; allocate it",
         [](Communicator comm) { return refusal(comm, {parameter("w", w, static_cast<float*>(nullptr), 2)}); }},
        {"or an empty Parameter; set it, or take it off the list",
         [](Communicator comm) {
             float* const none = nullptr;
             return refusal(comm, {parameter("w", none, none, 0)});
         }},
        {"has no elements; register it when it has its size", [](Communicator comm) { return refusal(comm, {parameter("w", w, g, 0)}); }},
        {"which can be summed only (Options::sum)",
         [](Communicator comm) {
             static std::int32_t numbers[2], sums[2];
             return refusal(comm, {parameter("n", numbers, sums, 2)});
         }},
        {"register tied weights once",
         [](Communicator comm) {
             return refusal(comm, {parameter("v", w, g, 2), parameter("w", w, g, 2)});
         }},
        {"has no value; give one",
         [](Communicator comm) {
             Reducer sync(comm, {parameter("w", static_cast<float*>(nullptr), g, 2)});
             return error_of([&] { sync.broadcast_parameters(); });
         }},
        {"was marked ready more than once before finish(); call finish() each step, and mark each gradient once, when its last contribution "
         "is in, in the last micro-batch",
         [](Communicator comm) { return marks(comm, 0, 2); }},
        {"mark each gradient once", [](Communicator comm) { return marks(comm, 1, 2); }, 2},
        {"mark every trainable parameter before finish(); set the gradient of one that the step does not use to 0",
         [](Communicator comm) { return marks(comm, 0, 0); }},
        {"set the gradient of one that the step does not use to 0", [](Communicator comm) { return marks(comm, 1, 0); }, 2},
        {"the weights of 'w' differ",
         [](Communicator comm) {
             w[0] = static_cast<float>(comm.rank());
             return marks(comm, 0, 1);
         },
         2},
        {"was written after its mark; mark it when its last contribution is in (a parameter that several layers use: register it once)",
         [](Communicator comm) {
             ::setenv("GRADSYNC_CHECKS", "1", 1);
             Reducer sync(comm, {parameter("v", w, g, 1), parameter("w", w + 1, g + 1, 1)});
             return error_of([&] {
                 sync.mark_ready(0);
                 g[0] += 1;
                 sync.mark_ready(1);
                 sync.finish();
             });
         }},
        {"a bucket cap is 0 bytes, but must be positive",
         [](Communicator comm) {
             gradsync::cxx14::Options options;
             options.bucket_bytes = 0;
             return error_of([&] { Reducer(comm, {parameter("w", w, g, 2)}, options); });
         }},
        {"a mean of i32 is not defined; use sum()",
         [](Communicator comm) {
             std::int32_t n = 1;
             return error_of([&] { comm.average(&n, 1); });
         }},
    };
    for (const Mistake& mistake : mistakes)
        for (const Report& report : on_processes(mistake.ranks, 60, mistake.make)) {
            INFO(report.text);
            CHECK(report.says(mistake.says));
            for (const char* const lacked : {"no_sync", "`uses`", "find_unused", "freeze", "in_buckets", "may_be_empty", "ParameterView",
                                             "parameter_traits", "Averaging", "ReducerOptions", "PerParameter"})
                CHECK(report.text.find(lacked) == std::string::npos);
        }
}
