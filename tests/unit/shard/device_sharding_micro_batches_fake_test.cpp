// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED ALONE LIBRARIES gradsync_device_support gradsync_fake_nccl gradsync_fake_passes
// Sharded training in device memory, over the fakes of support/fake, with several micro-batches a step.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include <doctest/doctest.h>

#include <vector>

#include "device_sharding_fakes.hpp"
#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/ranks_on_fakes.hpp"
#include "support/slow_build.hpp"

using namespace gradsync;
using gradsync_test::on_devices;
using gradsync_test::on_nccl_ranks;
using gradsync_test::staged;
using gradsync_test::views_of;

int prepare_tests() {
    gradsync_fake::connect_late();
    return -1;
}

TEST_CASE("sharding on devices counts micro-batches on any number of ranks") {
    for (const int size : gradsync_test::rank_counts())
        for (std::size_t all = static_cast<std::size_t>(size); all < 15; ++all) {
            CAPTURE(size);
            CAPTURE(all);
            const Deal deal{all, size, true};
            const auto train = [&]<class B>(B comm) {  // steps to minus the mean of 1, 2, ...
                gradsync_test::Numbers<B> weight(1000, 0);
                ParameterView view{.name = "w", .value = weight.view(), .gradient = weight.view()};
                view.gradient.data = nullptr;
                ShardedOptimizer sharded(comm, {view}, cuda::Sgd({.learning_rate = 1, .momentum = 0}),
                                         ShardingOptions{.reducer = {.accumulation = Accumulation::in_buckets, .micro_batches = all}},
                                         Zero2{});
                for (std::size_t turn = 0; turn < deal.rounds(); ++turn) {
                    const bool has_batch = turn < deal.count(comm.rank());
                    (void)sharded.begin_step(has_batch);
                    if (has_batch) {
                        const float gradient = static_cast<float>(deal.number(comm.rank(), turn) + 1);
                        gradsync_test::write(comm, sharded.acquire_gradient(0), std::vector<float>(1000, gradient));
                        sharded.mark_ready(0);
                    }
                    sharded.finish();
                }
                sharded.step();
                return gradsync_test::read(comm, weight.view());
            };
            const std::vector<float> expected(1000, static_cast<float>(all + 1) * -0.5f);
            CHECK(gradsync_test::distance(staged(size, train), expected) < 1e-6f);
            CHECK(gradsync_test::distance(on_devices(size, train), expected) < 1e-6f);
        }
}

TEST_CASE("sharding on devices: gradients are seen with their scale") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        weights.emplace_back(100, 3.0f);
        ShardedOptimizer sharded(comm, views_of(weights), cuda::Sgd(), Zero2{});
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
            detail::passes_of(comm).copy(sharded.parameter_value(0), sharded.acquire_gradient(0));
            sharded.mark_ready(0);
            sharded.finish();
        }
        float gradient = 0;
        sharded.for_each_gradient([&](const DeviceSlice& slice, double scale) {
            gradient = gradsync_test::read(comm, BufferView{const_cast<void*>(slice.gradient.data), slice.gradient.count,
                                                            slice.gradient.dtype, MemorySpace::device})[99] *
                       static_cast<float>(scale);
        });
        CHECK(gradient == 3.0f);  // the mean of two
        sharded.discard();
    });
}
