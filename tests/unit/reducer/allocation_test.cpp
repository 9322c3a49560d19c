// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE NOT_WITH thread
// Clang's thread sanitizer does not link beside the operators new and delete that count here.
// In the steady state a step allocates nothing: operator new counts, while all ranks are in their steps. It also has a
// limit, for what is said of memory that is not there.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/quantizer.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/optimizers.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};

constexpr std::size_t most_bytes = std::size_t{1} << 30;

void* counted(std::size_t bytes, std::size_t alignment) {
    if (bytes > most_bytes) throw std::bad_alloc();
    if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
    if (alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__) {
        if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    } else if (void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)) {
        return memory;
    }
    throw std::bad_alloc();
}

}  // namespace

// The other forms, of arrays and nothrow, call these. Not inlined, or GCC sees a free() of what operator new returned.
void* operator new(std::size_t bytes) { return counted(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return counted(bytes, static_cast<std::size_t>(alignment)); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Allocations in ten steps of all ranks, after ten others. `make(comm, model)` makes what `step(*made, model, number)` takes them with.
template <class Make, class Step>
int allocations_of(int ranks, DType dtype, Make&& make, Step&& step) {
    // Ranks meet at a spin barrier of the test's own, so that nothing but steps runs while it counts.
    std::atomic<int> arrived{0};
    const auto meet = [&](int target) {
        ++arrived;
        while (arrived < target * ranks) std::this_thread::yield();
    };
    int counted_here = -1;
    run_threads(
        ranks,
        [&](ThreadBackend comm) {
            auto model = tensors({1000, 20, 3000, 5, 0, 700}, dtype);
            const auto made = make(comm, model);
            for (int k = 0; k < 10; ++k) step(*made, model, k);
            meet(1);
            if (comm.rank() == 0) {
                allocations = 0;
                counting = true;
            }
            meet(2);
            for (int k = 10; k < 20; ++k) step(*made, model, k);
            meet(3);
            if (comm.rank() == 0) {
                counting = false;
                counted_here = allocations;
            }
            meet(4);
        },
        patient);
    return counted_here;
}

template <class Buckets, class Overlap = OverlapBackward, class Step>
int allocations_of(int ranks, ReducerOptions options, DType dtype, Step&& step, Overlap overlap = {}) {
    return allocations_of(
        ranks, dtype,
        [&](ThreadBackend comm, auto& model) {
            return std::make_unique<Reducer<ThreadBackend, Buckets, Overlap>>(comm, model, options, Buckets(), overlap);
        },
        step);
}

template <class Buckets, class Overlap>
void check_policies(Overlap overlap, ReducerOptions options, DType dtype = DType::f32) {
    for (const int ranks : rank_counts()) {
        CAPTURE(ranks);
        CAPTURE(describe(options));
        const auto step = [&](auto& sync, auto& model, int number) {
            if (options.averaging == Averaging::weighted_mean) sync.set_weight(2);
            if (number % 2 == 0) sync.mark_ready(model.back().name), sync.mark_ready();
            else
                for (std::size_t i = model.size(); i-- > 0;) sync.mark_ready(i);
            sync.finish();
        };
        CHECK(allocations_of<Buckets>(ranks, options, dtype, step, overlap) == 0);
    }
}

template <class Buckets, class Overlap>
void check_options(Overlap overlap = {}) {
    check_policies<Buckets>(overlap, {});
    check_policies<Buckets>(overlap, {.gradients = GradientStorage::in_buckets});
    check_policies<Buckets>(overlap, {.unused = UnusedParameters::find_unused});
    check_policies<Buckets>(overlap, {.reduce_dtype = DType::f32}, DType::bf16);
    check_policies<Buckets>(overlap, {.averaging = Averaging::weighted_mean});
}

}  // namespace

TEST_CASE("the counter counts") {
    counting = true;
    allocations = 0;
    std::vector<std::string> some(3, std::string(100, 'x'));
    counting = false;
    CHECK(allocations >= 4);
}

TEST_CASE("a steady step allocates nothing: PerParameter") {
    check_options<PerParameter, OverlapBackward>();
    check_options<PerParameter, NoOverlap>();
    check_options<PerParameter>(OverlapBackward(Progress::thread));
}
TEST_CASE("a steady step allocates nothing: Flat and SizeCappedBuckets") {
    check_options<Flat, OverlapBackward>();
    check_options<SizeCappedBuckets, OverlapBackward>();
    check_options<SizeCappedBuckets>(OverlapBackward(Progress::thread));
}

TEST_CASE("a steady step allocates nothing: micro-batches, join, norm and clipping") {
    for (const int ranks : rank_counts(1, 3)) {
        const auto everything = [&](auto& sync, auto& model, int k) {
            const bool has_batch = sync.backend().rank() != k % 3;
            if (!sync.begin_step(has_batch)) return;
            if (has_batch) {
                {
                    const auto guard = sync.no_sync();
                    for (std::size_t i = model.size(); i-- > 0;) sync.mark_ready(i);
                }
                for (std::size_t i = model.size(); i-- > 0;) sync.mark_ready(i);
            }
            while (!sync.try_finish()) std::this_thread::yield();
            sync.clip_gradients_by_norm(0.1);
            sync.clip_gradients_by_value(0.1);
        };
        CAPTURE(ranks);
        CHECK(allocations_of<SizeCappedBuckets, OverlapBackward>(ranks, {}, DType::f32, everything) == 0);
        CHECK(allocations_of<SizeCappedBuckets, OverlapBackward>(ranks, {.accumulation = Accumulation::in_buckets}, DType::bf16,
                                                                 everything) == 0);
    }
}

TEST_CASE("a steady step allocates nothing: unused parameters whose gradients live in the buckets") {
    for (const int ranks : rank_counts(1, 3)) {
        const auto some = [](auto& sync, auto& model, int k) {
            for (std::size_t i = model.size(); i-- > 0;)
                if (static_cast<int>(i) != k % 3) sync.mark_ready(i);
            sync.finish();
        };
        CAPTURE(ranks);
        CHECK(allocations_of<Flat, OverlapBackward>(
                  ranks, {.gradients = GradientStorage::in_buckets, .unused = UnusedParameters::find_unused}, DType::f32, some) == 0);
    }
}

TEST_CASE("a steady step allocates nothing: compressed") {
    const auto check = [](const auto& compressor) {
        using Exchange = std::remove_cvref_t<decltype(compressor)>;
        for (const int ranks : rank_counts(1, 3))
            for (const DType dtype : {DType::f32, DType::bf16}) {
                CAPTURE(ranks);
                CAPTURE(name_of(dtype));
                const auto make = [&](ThreadBackend comm, auto& model) {
                    model[0].shape = {25, 40};
                    model[2].shape = {60, 50};
                    return std::make_unique<Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward, Exchange>>(
                        comm, model, ReducerOptions{.averaging = Averaging::weighted_mean}, SizeCappedBuckets(8000), OverlapBackward{},
                        compressor);
                };
                CHECK(allocations_of(ranks, dtype, make, [](auto& sync, auto& model, int k) {
                          sync.set_weight(1 + k % 3);
                          for (std::size_t i = model.size(); i-- > 0;) sync.mark_ready(i);
                          sync.finish();
                      }) == 0);
            }
    };
    check(PowerSgd{.rank = 2, .start_step = 0});
    check(Quantizer{.bits = 4});
}

TEST_CASE("a steady step allocates nothing: sharded") {
    const auto step = [](auto& sharded, auto& model, auto&& before, auto&& in_use) {
        before();
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
            for (std::size_t i = model.size(); i-- > 0;) {
                [[maybe_unused]] const auto use = in_use(i);
                (void)sharded.acquire_gradient(i);
                sharded.mark_ready(i);
            }
            sharded.finish();
        }
        sharded.step(gradsync::clip_factor(sharded.gradient_norm(), 1.0));
    };
    for (const int ranks : rank_counts(1, 3)) {
        CAPTURE(ranks);
        for (const DType dtype : {DType::f32, DType::bf16}) {
            using Two = ShardedOptimizer<ThreadBackend, AdamW, Zero2, SizeCappedBuckets, OverlapForward>;
            CHECK(allocations_of(
                      ranks, dtype,
                      [](ThreadBackend comm, auto& model) {
                          return std::make_unique<Two>(comm, model, AdamW{}, ShardingOptions{}, SizeCappedBuckets(4000));
                      },
                      [&](auto& two, auto& model, int) {
                          step(
                              two, model, [&] { two.flush(); }, [](std::size_t) { return 0; });
                      }) == 0);
            using Three = ShardedParameters<ThreadBackend, AdamW>;
            CHECK(allocations_of(
                      ranks, dtype,
                      [](ThreadBackend comm, auto& model) {
                          return std::make_unique<Three>(comm, model, AdamW{}, Units({0, 0, 1, 1, 2, 2}));
                      },
                      [&](auto& three, auto& model, int) {
                          step(
                              three, model, [] {}, [&](std::size_t i) { return three.gather(three.unit_of(i)); });
                      }) == 0);
        }
    }
}

TEST_CASE("an error says which large buffer has no memory, and of how many bytes") {
    const Outcome refused = outcomes(1, [](ThreadBackend comm) {
        const BufferView no_memory(static_cast<float*>(nullptr), 2 * most_bytes / sizeof(float));
        const ParameterView w{.name = "w", .gradient = no_memory};
        Reducer sync(comm, std::vector{w}, {.gradients = GradientStorage::in_buckets});
    })[0];
    CHECK_MESSAGE((refused.is(Errc::storage) && refused.says("no memory for 2147483648 bytes of buckets")), refused.text);
}
