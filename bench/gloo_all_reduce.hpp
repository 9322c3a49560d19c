// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

#include "contest.hpp"

namespace bench {

/// Gloo's ring all-reduce over TCP on the loopback interface: one context a rank, the ranks threads of this process.
///
/// Each context has a thread that waits for the socket (epoll). If that wakes while the rank's own thread is inside the
/// connection's lock, it does not wait for the lock: it asks the socket again, and again, until the lock is free (Gloo's
/// transport/tcp/pair.cc, Pair::handleEvents). Where it has taken the very core of the rank's thread, which then cannot
/// leave the lock, that lasts until the system takes the core away from it: 4 ms where its clock ticks 250 times a second,
/// of a call that takes 0.15. So the threads of the contexts, which wake for almost every message, may not interrupt others
/// by that (SCHED_BATCH), and ranks are not kept on a core, where those threads would wait for them: on a quiet machine of
/// two cores 4 KiB took 175 us so, 354 us where they were. Nobody who uses Gloo sets the former, but slow because of how it
/// was measured it is not to be.
class GlooAllReduce final : public Contestant {
public:
    GlooAllReduce(std::vector<void*> buffers, std::size_t bytes)
        : contexts_(buffers.size()), tags_(buffers.size()), count_(bytes / sizeof(float)) {
        for (void* buffer : buffers) buffers_.push_back(static_cast<float*>(buffer));
        gloo::transport::tcp::attr attributes;
        attributes.hostname = "127.0.0.1";
        gloo::rendezvous::HashStore store;
        const std::vector<pid_t> before = threads_of_process();
        std::vector<std::thread> threads;
        for (std::size_t r = 0; r < contexts_.size(); ++r)
            threads.emplace_back([&, r] {
                auto context = std::make_shared<gloo::rendezvous::Context>(static_cast<int>(r), static_cast<int>(contexts_.size()));
                context->setTimeout(std::chrono::seconds(60));
                auto device = gloo::transport::tcp::CreateDevice(attributes);
                context->connectFullMesh(store, device);
                contexts_[r] = std::move(context);
            });
        for (std::thread& thread : threads) thread.join();
        for (pid_t thread : threads_of_process())
            if (std::find(before.begin(), before.end(), thread) == before.end()) never_interrupts(thread);
    }

    bool roams() const override { return true; }
    void meet(int rank) override {
        gloo::BarrierOptions options(contexts_[static_cast<std::size_t>(rank)]);
        gloo::barrier(options);
    }

    double run(int rank, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) all_reduce(static_cast<std::size_t>(rank));
        });
    }

private:
    void all_reduce(std::size_t rank) {
        gloo::AllreduceOptions options(contexts_[rank]);
        options.setOutput(buffers_[rank], count_);
        options.setTag(++tags_[rank].value);
        options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
        options.setReduceFunction([](void* c, const void* a, const void* b, std::size_t n) { gloo::sum<float>(c, a, b, n); });
        gloo::allreduce(options);
    }

    static std::vector<pid_t> threads_of_process() {
        std::vector<pid_t> found;
#if defined(__linux__)
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
            found.push_back(static_cast<pid_t>(std::stol(entry.path().filename().string())));
#endif
        return found;
    }

    /// Unless the whole process was told to be less than that. Says so where it is not allowed to.
    static void never_interrupts([[maybe_unused]] pid_t thread) {
#if defined(__linux__)
        const sched_param priority{};
        if (sched_getscheduler(thread) != SCHED_OTHER || sched_setscheduler(thread, SCHED_BATCH, &priority) == 0) return;
        std::fprintf(stderr, "Gloo's threads may interrupt its ranks, its times can be far too long: SCHED_BATCH: %s\n",
                     std::strerror(errno));
#endif
    }

    struct alignas(64) Tag {
        std::uint32_t value = 0;
    };
    std::vector<std::shared_ptr<gloo::rendezvous::Context>> contexts_;
    std::vector<Tag> tags_;
    std::vector<float*> buffers_;
    std::size_t count_;
};

}  // namespace bench
