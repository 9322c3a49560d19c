// SPDX-License-Identifier: BSL-1.0
#undef _FORTIFY_SOURCE  // whose longjmp refuses to change stacks

#include <ucontext.h>

#include <array>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "fake.hpp"
#include "kernels.hpp"  // last: it has macros

namespace gradsync_fake {

namespace {

constexpr std::size_t stack_bytes = std::size_t{64} << 10;

class Block;
Block& current_block();

/// The threads of one block at a time. A fiber runs one thread after another, until one has to wait: then the next fiber takes over.
class Block {
public:
    void run(unsigned threads, const std::function<void()>& kernel) {
        threads_ = threads;
        kernel_ = &kernel;
        begun_ = 0;
        block_ = Barrier{};
        warps_.assign((threads + 31) / 32, Warp{});
        std::vector<Fiber*> waiting;
        while (begun_ < threads_) {
            Fiber* const fiber = take_fiber();
            enter(*fiber);
            (fiber->waits ? waiting : spare_).push_back(fiber);
        }
        while (!waiting.empty()) {
            const std::size_t before = news_;
            std::vector<Fiber*> still;
            for (Fiber* const fiber : waiting) {
                enter(*fiber);
                (fiber->waits ? still : spare_).push_back(fiber);
            }
            if (news_ == before) {
                std::fprintf(stderr, "a kernel hangs: %zu threads of a block of %u wait for others that do not come\n", still.size(),
                             threads_);
                std::abort();
            }
            waiting = std::move(still);
        }
    }

    void await_block() { await(block_, threads_); }

    const unsigned long long* exchange(unsigned long long own) {
        const unsigned thread = place().thread.x;
        Warp& warp = warps_[thread / 32];
        // Two sets of values in turn: nobody overwrites what another has still to read.
        auto& values = warp.values[warp.barrier.generation % 2];
        values[thread % 32] = own;
        await(warp.barrier, 32);
        return values.data();
    }

    struct Copy {
        void* to;
        const void* from;
        unsigned bytes;
        bool there;
    };
    /// This thread's groups of copies; the last is not complete.
    std::deque<std::vector<Copy>>& copies() { return copies_[place().thread.x]; }

private:
    struct Fiber {
        std::unique_ptr<char[]> stack{new char[stack_bytes]};
        std::jmp_buf place;
        unsigned thread = 0;
        bool begun = false, waits = false;
    };
    struct Barrier {
        unsigned arrived = 0;
        std::size_t generation = 0;
    };
    struct Warp {
        Barrier barrier;
        std::array<std::array<unsigned long long, 32>, 2> values{};
    };

    void await(Barrier& barrier, unsigned members) {
        const std::size_t generation = barrier.generation;
        if (++barrier.arrived == members) {
            barrier.arrived = 0;
            ++barrier.generation;
            ++news_;
            return;
        }
        while (barrier.generation == generation) leave(true);
    }

    Fiber* take_fiber() {
        if (spare_.empty()) {
            all_.push_back(std::make_unique<Fiber>());
            return all_.back().get();
        }
        Fiber* const fiber = spare_.back();
        spare_.pop_back();
        return fiber;
    }
    /// Contexts begin a fiber; from then on jumps do, which call no kernel of the other kind.
    void enter(Fiber& fiber) {
        running_ = &fiber;
        fiber.waits = false;
        place().thread.x = fiber.thread;
        if (_setjmp(scheduler_) != 0) return;
        if (fiber.begun) _longjmp(fiber.place, 1);
        fiber.begun = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = fiber.stack.get();
        context.uc_stack.ss_size = stack_bytes;
        makecontext(
            &context, [] { current_block().main(); }, 0);
        setcontext(&context);
    }
    void leave(bool waits) {
        running_->waits = waits;
        if (_setjmp(running_->place) == 0) _longjmp(scheduler_, 1);
    }
    [[noreturn]] void main() {
        for (;; leave(false)) {
            while (begun_ < threads_) {
                running_->thread = place().thread.x = begun_++;
                copies().assign(1, {});
                (*kernel_)();
                ++news_;
            }
        }
    }

    unsigned threads_ = 0, begun_ = 0;
    const std::function<void()>* kernel_ = nullptr;
    Barrier block_;
    std::vector<Warp> warps_;
    std::array<std::deque<std::vector<Copy>>, 1024> copies_;  // by thread
    std::size_t news_ = 0;                                    ///< barriers that were passed, threads that have ended
    std::jmp_buf scheduler_;
    Fiber* running_ = nullptr;
    std::vector<std::unique_ptr<Fiber>> all_;
    std::vector<Fiber*> spare_;
};

Block& current_block() {
    thread_local Block only;
    return only;
}

}  // namespace

Place& place() {
    thread_local Place only;
    return only;
}
void await_block() { current_block().await_block(); }
const unsigned long long* exchange(unsigned long long own) { return current_block().exchange(own); }

void refuse_misaligned(const void* address, std::size_t alignment) {
    if (reinterpret_cast<std::uintptr_t>(address) % alignment == 0) return;
    std::fprintf(stderr, "a kernel loads or stores %zu bytes at %p, which is not aligned so\n", alignment, address);
    std::abort();
}

void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    const auto both = [](std::uint32_t low, std::uint32_t high) { return low | static_cast<unsigned long long>(high) << 32; };
    std::uint32_t as[32][4], bs[32][2];
    const auto gather = [&](unsigned long long own, auto& of_lanes, int at) {
        const unsigned long long* const all = exchange(own);
        for (unsigned lane = 0; lane < 32; ++lane) {
            of_lanes[lane][at] = static_cast<std::uint32_t>(all[lane]);
            of_lanes[lane][at + 1] = static_cast<std::uint32_t>(all[lane] >> 32);
        }
    };
    gather(both(a[0], a[1]), as, 0);
    gather(both(a[2], a[3]), as, 2);
    gather(both(b0, b1), bs, 0);
    const auto number = [](std::uint32_t pair, unsigned half) {
        const std::uint32_t bits = (half == 0 ? pair << 16 : pair & 0xffff0000u);
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    };
    const unsigned lane = place().thread.x % 32;
    for (unsigned e = 0; e < 4; ++e) {
        const unsigned row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (unsigned k = 0; k < 16; ++k)
            c[e] += number(as[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * number(bs[column * 4 + k % 8 / 2][k / 8], k % 2);
    }
}

void load_matrices(std::uint32_t (&to)[4], const std::uint16_t* row, bool transposed) {
    const unsigned long long* const rows = exchange(reinterpret_cast<std::uintptr_t>(row));
    const unsigned lane = place().thread.x % 32;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        const auto element = [&](unsigned i, unsigned j) {
            const auto address = static_cast<std::uintptr_t>(rows[matrix * 8 + i]);
            refuse_misaligned(reinterpret_cast<const void*>(address), 16);
            return std::uint32_t{reinterpret_cast<const std::uint16_t*>(address)[j]};
        };
        const unsigned own = lane / 4, pair = lane % 4 * 2;
        to[matrix] = transposed ? element(pair, own) | element(pair + 1, own) << 16 : element(own, pair) | element(own, pair + 1) << 16;
    }
}

void start_copy(void* to, const void* from, unsigned bytes, bool there) {
    refuse_misaligned(to, bytes);
    refuse_misaligned(from, bytes);
    std::memset(to, 0xff, bytes);
    current_block().copies().back().push_back({to, from, bytes, there});
}
void end_copies() { current_block().copies().emplace_back(); }
void await_copies(unsigned pending) {
    for (auto& groups = current_block().copies(); groups.size() > pending + 1; groups.pop_front()) {
        for (const Block::Copy& copy : groups.front()) {
            if (copy.there) std::memcpy(copy.to, copy.from, copy.bytes);
            else std::memset(copy.to, 0, copy.bytes);
        }
    }
}

void launch(cudaStream_t stream, dim3 blocks, unsigned threads, std::function<void()> kernel) {
    if (threads == 0 || threads % 32 != 0 || threads > 1024 || blocks.x == 0 || blocks.y == 0 || blocks.y > 65535 || blocks.z != 1) {
        std::fprintf(stderr, "a kernel cannot be started with %u x %u x %u blocks of %u threads\n", blocks.x, blocks.y, blocks.z, threads);
        std::abort();
    }
    enqueue(stream, [=, kernel = std::move(kernel)] {
        place().threads = dim3(threads);
        place().blocks = blocks;
        for (unsigned y = 0; y < blocks.y; ++y) {
            for (unsigned x = 0; x < blocks.x; ++x) {
                place().block = {x, y, 0};
                current_block().run(threads, kernel);
            }
        }
    });
}

}  // namespace gradsync_fake
