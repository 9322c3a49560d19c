// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/flight_recorder.hpp>
#include <gradsync/gradsync.hpp>

#include <gradsync/backend/tcp.hpp>

#include <doctest/doctest.h>

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/forked.hpp"
#include "support/ports.hpp"
#include "support/ranks.hpp"
#include "support/standard_error.hpp"
#include "support/temporary_directory.hpp"

namespace gs = gradsync;
using gs::collective::Call;
using gs::collective::FlightRecorder;

TEST_CASE("FlightRecorder says what ended last, and what has not ended") {
    FlightRecorder flights(0);
    CHECK(flights.summary().empty());
    Call call{.in_count = 25, .out_count = 25, .operation = gs::collective::Operation::all_reduce, .dtype = gs::DType::bf16};
    call.root = gs::CollectiveTag(gs::CollectiveTag::Kind::bucket, 1, 3).code();
    for (std::uint64_t n = 0; n < 100; ++n) {
        flights.start(n, call);
        if (n < 98) flights.end(n);
    }
    flights.end(7);  // no longer kept
    const std::string said = flights.summary();
    CAPTURE(said);
    const std::string what = " all_reduce(sum, bf16, 25 elements) for bucket 3 of Reducer #1 (started ";
    CHECK(said.find("; the last that ended here: #97" + what) == 0);
    CHECK(said.find("; in flight here: #") != std::string::npos);
    for (const char* const open : {"#98", "#99"}) CHECK(said.find(open + what) != std::string::npos);
}

TEST_CASE("FlightRecorder: an error says what its rank was in, and the environment has all of it written to files") {
    const gradsync_test::TemporaryDirectory directory;
    const std::string prefix = directory.file("flights");
    ::setenv("GRADSYNC_FLIGHT_RECORDER", prefix.c_str(), 1);
    const auto outcomes = gradsync_test::outcomes(2, [](gs::ThreadBackend comm) {
        std::vector<float> ten(10);
        comm.all_reduce(gs::buffer(ten), gs::ReduceOp::sum).wait();
        if (comm.rank() == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(600));
        comm.set_timeout(std::chrono::milliseconds(300));
        comm.broadcast(gs::buffer(ten), 1).wait();
    });
    ::unsetenv("GRADSYNC_FLIGHT_RECORDER");
    CAPTURE(outcomes[0].text);
    CHECK(outcomes[0].says("the last that ended here: #0 all_reduce(sum, f32, 10 elements) (started "));
    CHECK(outcomes[0].says("; in flight here: #1 broadcast(f32, 10 elements, root 1) (started "));
    std::ifstream file(prefix + ".0");
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    REQUIRE(lines.size() == 2);
    CHECK(lines[0].find("#0 all_reduce") == 0);
    CHECK(lines[1].find("#1 broadcast") == 0);
}

TEST_CASE("FlightRecorder: the rank whose own exception ends a step writes its file, too") {
    const gradsync_test::TemporaryDirectory directory;
    const std::string prefix = directory.file("flights");
    ::setenv("GRADSYNC_FLIGHT_RECORDER", prefix.c_str(), 1);
    const auto outcomes = gradsync_test::outcomes(2, [](gs::ThreadBackend comm) {
        std::vector<std::vector<float>> gradients(2, std::vector<float>(10));
        gs::Reducer sync(comm, gradients, gs::PerParameter());
        sync.mark_ready(1);
        if (comm.rank() == 1) throw std::runtime_error("bad sample");
        sync.mark_ready(0);
        sync.finish();
    });
    ::unsetenv("GRADSYNC_FLIGHT_RECORDER");
    CAPTURE(outcomes[0].text);
    CHECK(outcomes[0].says("rank 1 failed: an exception ended its step"));
    CHECK(outcomes[1].says("bad sample"));
    for (const std::string rank : {".0", ".1"}) {
        std::ifstream file(prefix + rank);
        std::string all;
        for (std::string line; std::getline(file, line);) all += line;
        CAPTURE(rank);
        // Rank 0 may hear of the failure before it starts that bucket.
        CHECK(all.find(rank == ".1" ? "all_reduce(mean, f32, 10 elements) for bucket 0 of Reducer #0" : "all_gather") != std::string::npos);
    }
}

TEST_CASE("FlightRecorder: a rank that drops a collective, and waits for no other, writes its file") {
    const gradsync_test::TemporaryDirectory directory;
    const std::string prefix = directory.file("flights");
    ::setenv("GRADSYNC_FLIGHT_RECORDER", prefix.c_str(), 1);
    const std::uint16_t port = gradsync_test::free_port();
    (void)gradsync_test::outcomes(2, [](gs::ThreadBackend comm) {
        std::vector<float> ten(10);
        if (comm.rank() == 1) (void)comm.all_reduce(gs::buffer(ten), gs::ReduceOp::sum);
    });
    const auto reports = gradsync_test::forked(2, [&](int rank) -> std::string {
        ::setenv("GRADSYNC_FLIGHT_RECORDER", (prefix + ".of_processes").c_str(), 1);
        gs::TcpRendezvous rendezvous({.rank = rank, .size = 2, .port = port});
        gs::TcpBackend comm(rendezvous);
        std::vector<float> ten(10);
        if (rank == 1) (void)comm.all_reduce(gs::buffer(ten), gs::ReduceOp::sum);
        return "done";
    });
    ::unsetenv("GRADSYNC_FLIGHT_RECORDER");
    for (const auto& report : reports) CHECK(report.text == "done");
    for (const std::string name : {".1", ".of_processes.1"}) {
        CAPTURE(name);
        std::ifstream file(prefix + name);
        std::string line;
        std::getline(file, line);
        CHECK(line.find("#0 all_reduce(sum, f32, 10 elements) (started ") == 0);
    }
}

TEST_CASE("FlightRecorder writes no file for an empty name") {
    ::setenv("GRADSYNC_FLIGHT_RECORDER", "", 1);
    gs::collective::FlightRecorder(7).write(7);
    ::unsetenv("GRADSYNC_FLIGHT_RECORDER");
    CHECK(::access(".7", F_OK) != 0);
}

TEST_CASE("FlightRecorder: a pipe that nobody reads holds up no rank") {
    const gradsync_test::TemporaryDirectory folder;
    REQUIRE(::mkfifo(folder.file("flights.7").c_str(), 0600) == 0);
    ::setenv("GRADSYNC_FLIGHT_RECORDER", folder.file("flights").c_str(), 1);
    const std::string said = gradsync_test::written_by([] { gs::collective::FlightRecorder(7).write(7); });
    ::unsetenv("GRADSYNC_FLIGHT_RECORDER");
    CHECK(said.find("flights.7: it is not a regular file; name a folder that you may write to") != std::string::npos);
}

TEST_CASE("FlightRecorder: a file that cannot be written is named") {
    ::setenv("GRADSYNC_FLIGHT_RECORDER", "/no/such/folder/flights", 1);
    const std::string said = gradsync_test::written_by([] { gs::collective::FlightRecorder(7).write(7); });
    ::unsetenv("GRADSYNC_FLIGHT_RECORDER");
    CAPTURE(said);
    CHECK(said.find("cannot write /no/such/folder/flights.7: No such file or directory; name a folder that you may write to") !=
          std::string::npos);
}
