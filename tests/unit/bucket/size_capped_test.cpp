// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/size_capped.hpp>

#include <doctest/doctest.h>

#include <string>

#include "support/plans.hpp"

using namespace gradsync_test;
using gradsync::DType;
using gradsync::ParameterInfo;
using gradsync::SizeCappedBuckets;

namespace {

Buckets plan_in_order(const SizeCappedBuckets& policy, const std::vector<ParameterInfo>& parameters) {
    return buckets(policy.plan(parameters, in_order(parameters.size())));
}

void check_refused(auto make, const std::string& word) {
    try {
        make();
        FAIL("not refused");
    } catch (const gradsync::Error& error) {
        CHECK(error.errc() == gradsync::Errc::invalid_argument);
        CHECK(std::string(error.what()).find(word) != std::string::npos);
    }
}

}  // namespace

TEST_CASE("PyTorch parity: one bucket limit closes buckets of one dtype") {
    CHECK(plan_in_order(SizeCappedBuckets(400, 400), floats({100, 200, 100, 50})) == Buckets{{0}, {1}, {2}, {3}});
}

TEST_CASE("PyTorch parity: one bucket limit closes the buckets of two interleaved dtypes apart") {
    const ParameterInfo f32{.count = 50, .dtype = DType::f32}, f64{.count = 25, .dtype = DType::f64};
    CHECK(plan_in_order(SizeCappedBuckets(400, 400), {f32, f64, f32, f64, f32, f64}) == Buckets{{0, 2}, {1, 3}, {4}, {5}});
}

TEST_CASE("PyTorch parity: several bucket limits apply in order to one dtype") {
    CHECK(plan_in_order(SizeCappedBuckets::with_caps({40, 80}), floats({10, 10, 10, 10})) == Buckets{{0}, {1, 2}, {3}});
}

TEST_CASE("PyTorch parity: several bucket limits are counted per dtype") {
    const ParameterInfo f32{.count = 50, .dtype = DType::f32}, f64{.count = 25, .dtype = DType::f64};
    CHECK(plan_in_order(SizeCappedBuckets::with_caps({200, 400}), {f32, f64, f32, f64, f32, f64}) == Buckets{{0}, {1}, {2, 4}, {3, 5}});
}

TEST_CASE("PyTorch parity: a bucket holds one dtype, whatever the caps") {
    std::vector<ParameterInfo> parameters;
    for (std::size_t i = 0; i < 30; ++i) parameters.push_back({.count = 1, .dtype = i % 3 ? DType::f32 : DType::bf16});
    for (const auto& bucket : plan_in_order(SizeCappedBuckets{}, parameters))
        for (const std::size_t i : bucket) CHECK(parameters[i].dtype == parameters[bucket[0]].dtype);
}

TEST_CASE("PyTorch parity: the first bucket to be reduced is the small one") {
    const std::size_t mib = std::size_t{1} << 18;  // floats
    const auto parameters = floats({10 * mib, 10 * mib, 10 * mib, mib / 2, mib / 2});
    CHECK(buckets(SizeCappedBuckets{}.plan(parameters, reversed(5))) == Buckets{{4, 3}, {2, 1}, {0}});
}

TEST_CASE("SizeCappedBuckets differs from PyTorch: the cap is honoured, not overshot") {
    // PyTorch closes a bucket once it has reached the limit: [[0, 1], [2]], the first of 240 bytes.
    CHECK(plan_in_order(SizeCappedBuckets(200), floats({30, 30, 30})) == Buckets{{0}, {1}, {2}});
    CHECK(plan_in_order(SizeCappedBuckets(240), floats({30, 30, 30})) == Buckets{{0, 1}, {2}});
}

TEST_CASE("SizeCappedBuckets: a parameter larger than the cap travels alone") {
    CHECK(plan_in_order(SizeCappedBuckets(100), floats({5, 1000, 5, 5})) == Buckets{{0}, {1}, {2, 3}});
}

TEST_CASE("SizeCappedBuckets: a parameter that is cheaper alone has a bucket of its own, counts for no cap and closes no bucket") {
    auto parameters = floats({5, 2, 5, 1000, 5, 5});
    parameters[1].cheaper_alone = parameters[3].cheaper_alone = true;
    CHECK(plan_in_order(SizeCappedBuckets(40), parameters) == Buckets{{1}, {0, 2}, {3}, {4, 5}});
    CHECK(plan_in_order(SizeCappedBuckets::with_caps({20, 40, 20}), parameters) == Buckets{{0}, {1}, {3}, {2, 4}, {5}});
    CHECK(buckets(SizeCappedBuckets{}.plan(parameters, reversed(6))) == Buckets{{3}, {1}, {5, 4, 2, 0}});
}

TEST_CASE("SizeCappedBuckets: empty parameters take part and count nothing") {
    CHECK(plan_in_order(SizeCappedBuckets(40), floats({0, 10, 0, 0, 10, 0})) == Buckets{{0, 1, 2, 3}, {4, 5}});
    CHECK(plan_in_order(SizeCappedBuckets(40), floats({0, 0})) == Buckets{{0, 1}});
    CHECK(plan_in_order(SizeCappedBuckets(40), {}).empty());
}

TEST_CASE("SizeCappedBuckets: buckets are launched in the order in which they become complete") {
    const ParameterInfo f32{.count = 10, .dtype = DType::f32}, f64{.count = 1, .dtype = DType::f64};
    CHECK(plan_in_order(SizeCappedBuckets(40), {f64, f32, f32, f64}) == Buckets{{1}, {2}, {0, 3}});
}

TEST_CASE("SizeCappedBuckets: only the parameters in the order take part") {
    CHECK(buckets(SizeCappedBuckets{}.plan(floats({1, 1, 1, 1}), std::vector<std::size_t>{3, 1})) == Buckets{{3, 1}});
}

TEST_CASE("SizeCappedBuckets: a cap below 1 MiB limits the first bucket too, unless both are given") {
    CHECK(SizeCappedBuckets(1000) == SizeCappedBuckets(1000, 1000));
    CHECK(SizeCappedBuckets(1000, 2000).caps().front() == 2000);
    CHECK(SizeCappedBuckets(std::size_t{25} << 20) == SizeCappedBuckets{});
    CHECK(SizeCappedBuckets{} == SizeCappedBuckets(std::size_t{25} << 20, std::size_t{1} << 20));
}

TEST_CASE("SizeCappedBuckets: equal policies describe themselves equally") {
    CHECK(SizeCappedBuckets{}.describe() == "SizeCappedBuckets{cap=26214400, first_cap=1048576}");
    CHECK(SizeCappedBuckets(40, 40).describe() == "SizeCappedBuckets{cap=40, first_cap=40}");
    CHECK(SizeCappedBuckets::with_caps({40, 80, 80}) == SizeCappedBuckets(80, 40));
    CHECK(SizeCappedBuckets::with_caps({40, 80, 60}).describe() == "SizeCappedBuckets{caps=[40, 80, 60]}");
}

TEST_CASE("SizeCappedBuckets: a cap of 0, or none, is refused with a sentence") {
    check_refused([] { SizeCappedBuckets(0); }, "0 bytes");
    check_refused([] { SizeCappedBuckets(100, 0); }, "PerParameter");
    check_refused([] { SizeCappedBuckets::with_caps({40, 0, 80}); }, "0 bytes");
    check_refused([] { SizeCappedBuckets::with_caps({}); }, "at least one");
}
