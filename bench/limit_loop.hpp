// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <gradsync/kernel/isa.hpp>

#include "contest.hpp"

namespace bench {

/// Adds `buffers` arrays of float and writes the sum to all of them, in one pass.
template <std::size_t buffers>
struct AddAndWriteAll {
    /// In registers of so many bytes.
    template <std::size_t bytes>
    struct With {
        using Pack [[gnu::vector_size(bytes), gnu::aligned(4), gnu::may_alias]] = float;

        GRADSYNC_ALWAYS_INLINE static void run(float* const* p, std::size_t first, std::size_t last) {
            constexpr std::size_t lanes = bytes / sizeof(float);
            std::size_t i = first;
            for (; i + 2 * lanes <= last; i += 2 * lanes) {
                Pack low = *reinterpret_cast<const Pack*>(p[0] + i);
                Pack high = *reinterpret_cast<const Pack*>(p[0] + i + lanes);
                for (std::size_t k = 1; k < buffers; ++k) {
                    low += *reinterpret_cast<const Pack*>(p[k] + i);
                    high += *reinterpret_cast<const Pack*>(p[k] + i + lanes);
                }
                for (std::size_t k = 0; k < buffers; ++k) {
                    *reinterpret_cast<Pack*>(p[k] + i) = low;
                    *reinterpret_cast<Pack*>(p[k] + i + lanes) = high;
                }
            }
            for (; i < last; ++i) {
                float sum = p[0][i];
                for (std::size_t k = 1; k < buffers; ++k) sum += p[k][i];
                for (std::size_t k = 0; k < buffers; ++k) p[k][i] = sum;
            }
        }
    };
};

/// What no all-reduce over buffers in one address space can beat: as many threads as there are ranks, or cores if
/// those are fewer, each add and write their slice of all buffers between two barriers, and do nothing else.
/// The elements are taken for floats whatever they are: bytes are what counts.
class LimitLoop final : public Contestant {
public:
    LimitLoop(std::vector<void*> buffers, std::size_t bytes)
        : threads_(std::min(static_cast<int>(buffers.size()), cores())), barrier_(threads_), count_(bytes / sizeof(float)) {
        for (void* buffer : buffers) buffers_.push_back(static_cast<float*>(buffer));
    }

    bool takes_part(int rank) const override { return rank < threads_; }
    bool needs_own_cores() const override { return true; }
    void meet(int rank) override { barrier_.wait(rank); }
    double run(int rank, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) {
                barrier_.wait(rank);
                add_slice(rank);
                barrier_.wait(rank);
            }
        });
    }

    static bool supports(int ranks) { return ranks == 2 || ranks == 3 || ranks == 4 || ranks == 6; }

private:
    void add_slice(int rank) {
        using gradsync::kernel::dispatch_vectors;
        const auto [first, last] = slice(rank);
        float* const* p = buffers_.data();
        switch (buffers_.size()) {
            case 2: return dispatch_vectors<AddAndWriteAll<2>>(p, first, last);
            case 3: return dispatch_vectors<AddAndWriteAll<3>>(p, first, last);
            case 4: return dispatch_vectors<AddAndWriteAll<4>>(p, first, last);
            case 6: return dispatch_vectors<AddAndWriteAll<6>>(p, first, last);
            default: return;
        }
    }

    std::pair<std::size_t, std::size_t> slice(int rank) const {
        constexpr std::size_t line = 64 / sizeof(float);
        const auto threads = static_cast<std::size_t>(threads_);
        const std::size_t each = (count_ / threads + line - 1) / line * line;
        const std::size_t first = std::min(each * static_cast<std::size_t>(rank), count_);
        return {first, std::min(first + each, count_)};
    }

    int threads_;
    SpinBarrier barrier_;
    std::size_t count_;
    std::vector<float*> buffers_;
};

}  // namespace bench
