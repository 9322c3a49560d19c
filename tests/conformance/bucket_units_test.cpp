// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/bucket/units.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "conformance/bucket_policy.hpp"

namespace {

/// Units of so many parameters each, for as many parameters as it is asked for; neighbours, or those that stand far apart.
struct UnitsOf {
    std::size_t parameters_each;
    bool apart = false;

    gradsync::BucketPlan plan(std::span<const gradsync::ParameterInfo> parameters, std::span<const std::size_t> order) const {
        const std::size_t units = (parameters.size() + parameters_each - 1) / parameters_each;
        std::vector<std::size_t> unit_of(parameters.size());
        for (std::size_t i = 0; i < unit_of.size(); ++i) unit_of[i] = apart ? i % units : i / parameters_each;
        return gradsync::Units(std::move(unit_of)).plan(parameters, order);
    }
    std::string describe() const {
        return "Units of " + std::to_string(parameters_each) + (apart ? " parameters that stand apart" : " neighbours");
    }
};

}  // namespace

TEST_CASE("Units is a bucket policy, with a unit for each parameter") { gradsync_test::check_bucket_policy(UnitsOf{1}); }
TEST_CASE("Units is a bucket policy, with units of neighbours") { gradsync_test::check_bucket_policy(UnitsOf{12}); }
TEST_CASE("Units is a bucket policy, with units whose parameters stand apart") { gradsync_test::check_bucket_policy(UnitsOf{12, true}); }
TEST_CASE("Units is a bucket policy, with one unit of all") { gradsync_test::check_bucket_policy(UnitsOf{1'000'000}); }
