// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: pass a range of parameters, e.g. .gs::parameter
// expect 2: gradsync: pass a range of parameters, e.g. .gs::parameter
// expect 3: gradsync: pass a range of parameters, e.g. .* a range of numbers is one gradient
// expect 4: gradsync: give this range a name that outlives the object: its gradients are gone with the temporary
// expect 5: gradsync: give this range a name that outlives the object: its gradients are gone with the temporary
// expect 6: gradsync: give this range of unique pointers a name that outlives the object: its tensors are gone with the temporary
// errors: 1
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include <gradsync/gradsync.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

namespace gs = gradsync;

void f(gs::ThreadBackend comm, [[maybe_unused]] std::vector<float>& weights, [[maybe_unused]] std::vector<float>& gradient) {
#if GRADSYNC_EXPECT_FAILURE == 1
    gs::Reducer sync(comm, gs::parameter("w", weights, gradient));
#elif GRADSYNC_EXPECT_FAILURE == 2
    const gs::ParameterView w = gs::parameter("w", weights, gradient);
    gs::Reducer sync(comm, w);
#elif GRADSYNC_EXPECT_FAILURE == 3
    gs::Reducer sync(comm, gradient);
#elif GRADSYNC_EXPECT_FAILURE == 4
    gs::Reducer sync(comm, std::vector<std::vector<float>>(2));
#elif GRADSYNC_EXPECT_FAILURE == 5
    gs::Reducer sync(comm, std::deque<std::vector<float>>(2));
#elif GRADSYNC_EXPECT_FAILURE == 6
    gs::Reducer sync(comm, std::vector<std::unique_ptr<std::vector<float>>>(2));
#else
    gs::Reducer braces(comm, {gs::parameter("w", weights, gradient)});
    gs::Reducer one(comm, std::vector{std::span(gradient)});
    gs::Reducer sync(comm, std::vector{gs::parameter("w", weights, gradient)});
    std::vector<std::vector<float>> gradients(2);
    gs::Reducer view(comm, std::span(gradients));
    std::vector<std::unique_ptr<std::vector<float>>> unique(2);
    gs::Reducer pointers(comm, std::span(unique));
    gs::Reducer shared(comm, std::vector<std::shared_ptr<std::vector<float>>>(2));
#endif
}
