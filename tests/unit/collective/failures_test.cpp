// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/failures.hpp>

#include <doctest/doctest.h>

#include <vector>

using namespace gradsync;
using namespace gradsync::collective;

TEST_CASE("mismatch: a rank is never blamed against itself, also where it is rank 0 that does not fit the root") {
    std::vector<Call> calls(3);
    for (Call& call : calls) {
        call.operation = Operation::gather;
        call.root = 1;
        call.in_count = 2;
    }
    calls[1].out_count = 6;
    CHECK(first_misfit(calls) == -1);
    calls[0].in_count = 5;
    REQUIRE(first_misfit(calls) == 0);
    const Failure failure = mismatch(7, calls, 0, std::vector{10, 11, 12});
    CHECK(failure.culprit == 10);
    CHECK(failure.message ==
          "collective #7 differs: rank 11 started gather(f32, 2 of 6 elements, root 1), rank 10 started "
          "gather(f32, 5 elements, root 1); all ranks must start the same collectives in the same order");
    calls[0].in_count = 2;
    calls[2].operation = Operation::barrier;
    REQUIRE(first_misfit(calls) == 2);
    CHECK(mismatch(7, calls, 2, std::vector{0, 1, 2})
              .message.find("rank 0 started gather(f32, 2 elements, root 1), rank 2 started barrier()") != std::string::npos);
}

TEST_CASE("mismatch: a call of another process that makes no sense is described, and indexes nothing") {
    std::vector<Call> calls(2);
    calls[0].root = 1 << 30;
    calls[0].in_count = 1;
    REQUIRE(first_misfit(calls) == 0);
    CHECK(mismatch(0, calls, 0, std::vector{0, 1}).message.find("rank 1 started barrier() for a call outside of buckets") !=
          std::string::npos);
    calls[0].operation = static_cast<Operation>(200);
    calls[0].dtype = static_cast<DType>(201);
    CHECK(describe(calls[0]) == "nonsense(nonsense, 1 elements)");
}

TEST_CASE("timed_out: names the ranks that did not start it") {
    const Late none, one{{4}, Late::Did::not_start}, several{{1, 3}, Late::Did::not_start}, stopped{{1, 3}, Late::Did::not_go_on},
        silent{{0}, Late::Did::not_answer}, waits{{0}, Late::Did::wait_itself};
    CHECK(timed_out("x", none, 0, std::chrono::milliseconds(1500))
              .message.find("its work did not end, though every rank started it while rank 0 waited 1.5 s") != std::string::npos);
    CHECK(timed_out("x", one, 0, std::chrono::seconds(2)).message.find("x: rank 4 did not start it while rank 0 waited 2 s") == 0);
    CHECK(timed_out("x", several, 0, std::chrono::seconds(2)).message.find("x: ranks 1, 3 did not start it") == 0);
    CHECK(timed_out("x", stopped, 0, std::chrono::seconds(2))
              .message.find("x: ranks 1, 3 started it like all others, but made no progress while rank 0") == 0);
    CHECK(timed_out("x", silent, 1, std::chrono::seconds(2)).message.find("x: rank 0 did not answer while rank 1 waited 2 s") == 0);
    CHECK(timed_out("x", silent, 1, std::chrono::seconds(2)).culprit == 0);
    CHECK(timed_out("x", waits, 1, std::chrono::seconds(2))
              .message.find("x: rank 0 is itself waiting for one that did not start it, while rank 1 waited 2 s") == 0);
    CHECK(timed_out("x", waits, 1, std::chrono::seconds(2)).culprit == -1);
    CHECK(timed_out("x", several, 0, std::chrono::seconds(2)).culprit == 1);
    CHECK(timed_out("x", none, 0, std::chrono::seconds(2)).culprit == -1);
}
