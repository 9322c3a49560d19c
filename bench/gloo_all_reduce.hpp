#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

#include "contest.hpp"

namespace bench {

/// Gloo's ring all-reduce over TCP on the loopback interface: one context a rank, the ranks threads of this process.
class GlooAllReduce final : public Contestant {
public:
    GlooAllReduce(std::vector<void*> buffers, std::size_t bytes)
        : contexts_(buffers.size()), tags_(buffers.size()), count_(bytes / sizeof(float)) {
        for (void* buffer : buffers) buffers_.push_back(static_cast<float*>(buffer));
        gloo::transport::tcp::attr attributes;
        attributes.hostname = "127.0.0.1";
        gloo::rendezvous::HashStore store;
        std::vector<std::thread> threads;
        for (std::size_t r = 0; r < contexts_.size(); ++r)
            threads.emplace_back([&, r] {
                auto context = std::make_shared<gloo::rendezvous::Context>(static_cast<int>(r),
                                                                           static_cast<int>(contexts_.size()));
                context->setTimeout(std::chrono::seconds(60));
                auto device = gloo::transport::tcp::CreateDevice(attributes);
                context->connectFullMesh(store, device);
                contexts_[r] = std::move(context);
            });
        for (std::thread& thread : threads) thread.join();
    }

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
        options.setReduceFunction(
            [](void* c, const void* a, const void* b, std::size_t n) { gloo::sum<float>(c, a, b, n); });
        gloo::allreduce(options);
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
