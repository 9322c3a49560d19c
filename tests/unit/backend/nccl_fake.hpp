// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <gradsync/backend/nccl.hpp>

#include "conformance/backend/launcher.hpp"
#include "support/device_memory.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

/// What the tests of NcclBackend over the fakes share.

namespace gradsync_test {

/// Runs `f` on ranks that are threads. One function for all of them: what a file of tests takes to compile is threads and promises, once
/// for every lambda.
inline void on_nccl_ranks(int size, const std::function<void(gradsync::NcclBackend)>& f,
                          gradsync::NcclOptions options = {.timeout = std::chrono::seconds(60)}) {
    run_rank_threads(
        size, [&](auto& rendezvous) { return gradsync::NcclBackend(rendezvous, options); }, f);
    CHECK(gradsync_fake::misuses() == 0);
}

/// Waits a while for `condition`.
inline bool soon(const std::function<bool()>& condition) {
    for (int i = 0; i < 10000; ++i) {
        if (condition()) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
}

inline std::vector<std::byte> floats(std::size_t count, float value) {
    const std::vector<float> numbers(count, value);
    const auto bytes = std::as_bytes(std::span(numbers));
    return {bytes.begin(), bytes.end()};
}
inline float first_of(const DeviceMemory& memory) {
    float value;
    std::memcpy(&value, memory.read().data(), sizeof value);
    return value;
}
inline gradsync::BufferView view_of(DeviceMemory& memory, std::size_t count) {
    return {memory.data(), count, gradsync::DType::f32, gradsync::MemorySpace::device};
}

/// That nothing is left behind.
struct Nothing {
    int before = gradsync_fake::living();
    ~Nothing() {
        // Aborts and retired worlds take a moment.
        CHECK_MESSAGE(soon([&] { return gradsync_fake::living() == before; }), gradsync_fake::describe_living());
    }
};

}  // namespace gradsync_test
