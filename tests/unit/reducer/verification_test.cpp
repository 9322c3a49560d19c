// SPDX-License-Identifier: BSL-1.0
// Ranks that construct different Reducers: every rank throws the same text, and may go on.
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Constructs `make(backend, odd)` on every rank, `odd` on one of them, which is each in turn. Every rank must throw
/// one text with these words, and must be able to use the communicator and to construct the right thing afterwards.
void check_mismatch(const std::vector<std::string>& words, const std::string& parameter,
                    const std::function<void(ThreadBackend, bool odd)>& make) {
    for (const int ranks : rank_counts(2))
        for (int guilty = 0; guilty < ranks; ++guilty) {
            std::vector<Outcome> result(static_cast<std::size_t>(ranks));
            REQUIRE(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                        const int rank = comm.rank();
                        result[static_cast<std::size_t>(rank)] = outcome_of([&] { make(comm, rank == guilty); });
                        std::int32_t one = 1;
                        comm.all_reduce(buffer(std::span(&one, 1)), ReduceOp::sum).wait();
                        finding.check(one == ranks, "the communicator is of no more use");
                        const Outcome again = outcome_of([&] { make(comm, false); });
                        finding.check(again.text.empty(), "the right parameters were refused: " + again.text);
                    }) == "");
            for (int r = 0; r < ranks; ++r) {
                const Outcome& outcome = result[static_cast<std::size_t>(r)];
                INFO(outcome.text);
                REQUIRE(outcome.is(Errc::parameter_mismatch));
                CHECK(outcome.text == result[0].text);
                for (const std::string& word : words) CHECK_MESSAGE(outcome.says(word), "missing: " << word);
                CHECK(outcome.error->context().rank == r);
                CHECK(outcome.error->context().peer == (guilty == 0 ? 1 : guilty));
                if (!parameter.empty()) CHECK(outcome.error->context().parameter == parameter);
            }
        }
}

/// Counts what is allocated, which is collective: ranks that want different buckets must not get so far.
struct CountingBackend : ThreadBackend {
    CountingBackend(ThreadBackend backend, int& count) : ThreadBackend(std::move(backend)), allocations(&count) {}
    CountingBackend split(int color, int key) { return {ThreadBackend::split(color, key), *allocations}; }
    CountingBackend duplicate() { return {ThreadBackend::duplicate(), *allocations}; }
    auto allocate(std::size_t bytes) {
        ++*allocations;
        return ThreadBackend::allocate(bytes);
    }
    int* allocations;
};
static_assert(Backend<CountingBackend>);

/// The odd rank's model is changed by `change`.
void check_odd_model(const std::vector<std::string>& words, const std::string& parameter,
                     const std::function<void(std::vector<Tensor>&)>& change) {
    check_mismatch(words, parameter, [&](ThreadBackend comm, bool odd) {
        auto model = tensors({10, 24, 30});
        model[1] = Tensor("fc.weight", DType::f32, {4, 6});
        if (odd) change(model);
        Reducer sync(comm, model);
    });
}

}  // namespace

TEST_CASE("PyTorch parity: every rank throws the same text if shapes differ, naming the parameter") {
    check_odd_model({"parameter 1", "'fc.weight' f32 [4, 6]", "'fc.weight' f32 [6, 4]"}, "fc.weight", [](auto& model) {
        model[1] = Tensor("fc.weight", DType::f32, {6, 4});
    });
    check_odd_model({"'fc.weight' f32 [4, 6]", "'fc.weight' f32 [24]"}, "fc.weight",
                    [](auto& model) { model[1] = Tensor("fc.weight", DType::f32, {24}); });
    check_odd_model({"'fc.weight' f32 [4, 6]", "'fc.weight' f32 [4, 7]"}, "fc.weight", [](auto& model) {
        model[1] = Tensor("fc.weight", DType::f32, {4, 7});
    });
}
TEST_CASE("PyTorch parity: every rank throws the same text if dtypes differ, naming the parameter") {
    check_odd_model({"'fc.weight' f32 [4, 6]", "'fc.weight' bf16 [4, 6]"}, "fc.weight", [](auto& model) {
        model[1] = Tensor("fc.weight", DType::bf16, {4, 6});
    });
}
TEST_CASE("PyTorch parity: every rank throws the same text if counts differ, naming the first extra parameter") {
    check_odd_model({"the number of parameters", "3 parameters, of which 'p2' f32 [30]", "2 parameters"}, "",
                    [](auto& model) { model.pop_back(); });
    check_odd_model({"3 parameters", "4 parameters, of which 'extra' f32 [5]"}, "",
                    [](auto& model) { model.emplace_back("extra", DType::f32, std::vector<std::size_t>{5}); });
    check_odd_model({"0 parameters"}, "", [](auto& model) { model.clear(); });
}
TEST_CASE("PyTorch parity: every rank throws the same text if names or order differ") {
    check_odd_model({"parameter 1", "'fc.weight'", "'fc.bias'"}, "", [](auto& model) { model[1].name = "fc.bias"; });
    check_odd_model({"parameter 0", "'p0' f32 [10]", "'p2' f32 [30]"}, "", [](auto& model) { std::swap(model[0], model[2]); });
}
TEST_CASE("parameters that differ in freezing or uses are refused on every rank") {
    check_odd_model({"'p2' f32 [30]", "'p2' f32 [30], frozen"}, "p2", [](auto& model) { model[2].requires_grad = false; });
    check_odd_model({"'p2' f32 [30]", "'p2' f32 [30], used 2 times"}, "p2", [](auto& model) { model[2].uses = 2; });
}
TEST_CASE("ranks of a split communicator are named as before the split, and ranks of the other part blame the right one") {
    std::vector<Outcome> seen(4);
    std::string said;
    try {
        run_threads(4, [&](ThreadBackend world) {
            const int rank = world.rank();
            ThreadBackend part = world.split(rank / 2, rank);
            auto model = tensors({rank == 3 ? 11u : 10u});
            try {
                const Reducer sync(part, model);
                world.barrier().wait();
            } catch (const Error& error) {
                seen[static_cast<std::size_t>(rank)].error = error;
                throw;
            }
        });
    } catch (const Error& error) {
        said = error.what();
        CHECK(error.errc() == Errc::parameter_mismatch);
        CHECK(error.context().peer == 3);
    }
    CAPTURE(said);
    CHECK(said.find("rank 2 has ") != std::string::npos);
    CHECK(said.find("rank 3 has ") != std::string::npos);
    for (const Outcome& outcome : {seen[0], seen[1]}) {
        REQUIRE(outcome.error);
        CHECK(outcome.error->context().peer >= 2);
    }
}

TEST_CASE("the first difference is the one that is named") {
    check_odd_model({"parameter 1", "'fc.weight'", "'other'"}, "", [](auto& model) {
        model[1].name = "other";
        model[2].name = "later";
        model.pop_back();
    });
}
TEST_CASE("names that differ late in a long text are told apart") {
    const std::string prefix(3000, 'x');
    check_mismatch({"xa' f32", "xb' f32"}, "", [&](ThreadBackend comm, bool odd) {
        auto model = tensors({10});
        model[0].name = prefix + (odd ? "b" : "a");
        Reducer sync(comm, model);
    });
}

TEST_CASE("a shape that is given and one that is not are the same in one dimension") {
    CHECK(findings(2, [](ThreadBackend comm, Finding&) {
              std::vector<float> gradient(10);
              std::vector<ParameterView> views{{.name = "w", .gradient = buffer(gradient)}};
              if (comm.rank() == 1) views[0].shape = {10};
              Reducer sync(comm, views);
          }) == "");
}

TEST_CASE("bucket policies that differ in type or numbers are refused on every rank") {
    const auto with = [](auto buckets) {
        return [=](ThreadBackend comm, bool) {
            auto model = tensors({10, 20, 30});
            Reducer sync(comm, model, {}, buckets);
        };
    };
    const auto or_else = [](auto usual, auto odd) {
        return [=](ThreadBackend comm, bool is_odd) { is_odd ? odd(comm, true) : usual(comm, false); };
    };
    check_mismatch({"setting", "Flat", "PerParameter"}, "", or_else(with(Flat{}), with(PerParameter{})));
    check_mismatch({"setting", "cap=40", "cap=80"}, "", or_else(with(SizeCappedBuckets(40)), with(SizeCappedBuckets(80))));
    // The same plan, but not the same policy.
    check_mismatch({"Flat", "SizeCappedBuckets"}, "", or_else(with(Flat{}), with(SizeCappedBuckets())));
}

TEST_CASE("overlap policies that differ are refused on every rank") {
    check_mismatch({"setting", "NoOverlap", "OverlapBackward"}, "", [](ThreadBackend comm, bool odd) {
        auto model = tensors({10, 20, 30});
        if (odd) Reducer(comm, model, {}, Flat{}, NoOverlap{});
        else Reducer(comm, model, {}, Flat{}, OverlapBackward{});
    });
    check_mismatch({"setting", "has OverlapBackward", "has OverlapBackward{thread}"}, "", [](ThreadBackend comm, bool odd) {
        auto model = tensors({10, 20, 30});
        Reducer(comm, model, {}, Flat{}, OverlapBackward(odd ? Progress::thread : Progress::automatic));
    });
    check_mismatch({"setting", "has OverlapForward{polls}", "has OverlapForward{thread}"}, "", [](ThreadBackend comm, bool odd) {
        auto model = tensors({10, 20, 30});
        Reducer(comm, model, {}, Flat{}, OverlapForward(odd ? Progress::thread : Progress::polls));
    });
}

TEST_CASE("options that differ are refused on every rank") {
    const std::vector<std::pair<ReducerOptions, std::string>> odd_options{
        {{.gradients = GradientStorage::in_buckets}, "gradients=in_buckets"},
        {{.averaging = Averaging::sum}, "averaging=sum"},
        {{.averaging = Averaging::weighted_mean}, "averaging=weighted_mean"},
        {{.accumulation = Accumulation::in_buckets}, "accumulation=in_buckets"},
        {{.unused = UnusedParameters::find_unused}, "unused=find_unused"},
        {{.divisor = JoinDivisor::all_ranks}, "divisor=all_ranks"},
        {{.reduce_dtype = DType::bf16}, "reduce_dtype=bf16"}};
    for (const auto& different : odd_options)
        check_mismatch({"setting", "has " + different.second}, "", [&](ThreadBackend comm, bool odd) {
            auto model = tensors({10, 20, 30});
            Reducer sync(comm, model, odd ? different.first : ReducerOptions{});
        });
}

TEST_CASE("the error shows the options and policies that differ, and no other") {
    const auto text_of = [](const auto& make) {
        const Outcome outcome = outcome_of([&] { run_threads(2, make); });
        CHECK(outcome.is(Errc::parameter_mismatch));
        return outcome.text;
    };
    const std::string remedy = "; all ranks must construct it with the same policies and options";
    CHECK(text_of([](ThreadBackend comm) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model, {.averaging = comm.rank() == 0 ? Averaging::mean : Averaging::sum});
          }) == "a setting differs: rank 0 has averaging=mean, rank 1 has averaging=sum" + remedy);
    CHECK(text_of([](ThreadBackend comm) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model, {.reduce_dtype = comm.rank() == 0 ? OptionalDType() : DType::bf16},
                           SizeCappedBuckets(comm.rank() == 0 ? 40 : 80));
          }) ==
          "a setting differs: rank 0 has SizeCappedBuckets{cap=40, first_cap=40} reduce_dtype=own, rank 1 has "
          "SizeCappedBuckets{cap=80, first_cap=80} reduce_dtype=bf16" +
              remedy);
    CHECK(text_of([](ThreadBackend comm) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model, PowerSgd{.rank = comm.rank() == 0 ? 1u : 2u});
          }) ==
          "a setting differs: rank 0 has PowerSgd{rank=1, start_step=1000, min_compression_rate=2, seed=0}, rank 1 has "
          "PowerSgd{rank=2, start_step=1000, min_compression_rate=2, seed=0}" +
              remedy);
}

TEST_CASE("policies and options are arguments in any order, and parameters may stand in braces") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              std::vector<float> one(300, static_cast<float>(comm.rank())), other(5), weights(300), bias(5);
              Reducer sync(comm, {parameter("one", weights, one), parameter("other", bias, other)}, OverlapForward{}, PerParameter{},
                           ReducerOptions{.averaging = Averaging::sum});
              finding.check(sync.plan().size() == 2 && sync.parameters()[1].name == "other", "it has other parameters or buckets");
              sync.mark_ready(1);
              sync.mark_ready(0);
              sync.finish().wait();
              finding.check(one[299] == 1, "no sum");
          }) == "");
}

namespace {

/// Plans whatever the test says.
struct AnyPlan {
    std::vector<std::vector<std::size_t>> buckets;
    BucketPlan plan(std::span<const ParameterInfo>, std::span<const std::size_t>) const {
        BucketPlan result;
        for (const auto& bucket : buckets) result.push_back(bucket);
        return result;
    }
    std::string describe() const { return "AnyPlan"; }
};
static_assert(BucketPolicy<AnyPlan>);

}  // namespace

TEST_CASE("a policy that plans differently on different ranks is refused on every rank") {
    check_mismatch({"the bucket plan"}, "", [](ThreadBackend comm, bool odd) {
        auto model = tensors({10, 20, 30});
        if (odd) Reducer(comm, model, {}, AnyPlan{{{2, 1}, {0}}});
        else Reducer(comm, model, {}, AnyPlan{{{2}, {1, 0}}});
    });
}

TEST_CASE("PyTorch parity: a bucket of mixed dtypes is refused, as is every plan that is none") {
    const auto refused = [](std::vector<std::vector<std::size_t>> buckets, const std::string& words) {
        const Outcome outcome = outcome_of([&] {
            run_threads(1, [&](ThreadBackend comm) {
                auto model = tensors({10, 20, 30, 40});
                model[1] = Tensor("half", DType::bf16, {20});
                model[3].requires_grad = false;
                Reducer sync(comm, model, {.gradients = GradientStorage::in_buckets}, AnyPlan{buckets});
            });
        });
        INFO(outcome.text);
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK(outcome.says(words));
        CHECK(outcome.says("AnyPlan"));
    };
    refused({{2, 1}, {0}}, "'half' in bucket 0 of f32");
    refused({{2, 0}}, "'half' in no bucket");
    refused({{2, 0}, {1}, {2}}, "'p2' in bucket 2, but it was in one before");
    refused({{2, 0}, {1}, {3}}, "'p3' in bucket 2, but it is frozen");
    refused({{2, 0}, {1}, {4}}, "'4' in bucket 2, but there is no such parameter");
    refused({{2, 0}, {}, {1}}, "bucket 1 empty");
}

TEST_CASE("parameters that cannot be synchronised are refused on the ranks that have them") {
    const auto refused = [](const ParameterView& view, ReducerOptions options = {}) {
        const Outcome outcome = outcome_of([&] { run_threads(1, [&](ThreadBackend comm) { Reducer(comm, std::vector{view}, options); }); });
        CHECK(outcome.is(Errc::invalid_argument));
        if (outcome.error) CHECK(outcome.error->context().parameter == "w");
        return outcome.text;
    };
    std::vector<float> ten(10), nine(9);
    CHECK(refused({.name = "w", .gradient = buffer(ten), .shape = {3, 3}}).find("a shape of 9 elements, but a gradient of 10") !=
          std::string::npos);
    CHECK(refused({.name = "w", .value = buffer(nine), .gradient = buffer(ten)}).find("9 values, but a gradient of 10") !=
          std::string::npos);
    CHECK(refused({.name = "w", .gradient = buffer(ten), .uses = 0}).find("0 uses") != std::string::npos);
    CHECK(refused({.name = "w", .gradient = {nullptr, 10, DType::f32, MemorySpace::host}}).find("no gradient memory") != std::string::npos);
    CHECK(refused({.name = "w", .gradient = {ten.data(), 10, DType::f32, MemorySpace::device}}).find("device memory") != std::string::npos);
}

TEST_CASE("a null pointer among the parameters is refused, on one rank or several") {
    for (int ranks = 1; ranks <= 4; ++ranks) {
        const Outcome outcome = outcome_of([&] {
            run_threads(ranks, [&](ThreadBackend comm) {
                std::vector<float> gradient(10);
                std::vector<float>* const bias = comm.rank() == ranks - 1 ? nullptr : &gradient;
                std::vector<float> weights(10);
                Reducer sync(comm, std::vector{&weights, bias});
            });
        });
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK(outcome.says(
            "parameter '1' has no elements, no gradient and no value: a null pointer, or an empty ParameterView; set it, or take it off the list"));
    }
}

namespace {

/// What a Reducer of one rank, alone, says of a parameter; "" if it takes it.
template <class P>
std::string refusal_of(P parameter, ReducerOptions options = {}) {
    const Outcome outcome =
        outcome_of([&] { run_threads(1, [&](ThreadBackend comm) { Reducer(comm, std::vector{parameter}, options); }); });
    CHECK((outcome.text.empty() || (outcome.is(Errc::invalid_argument) && outcome.error->context().parameter == "w")));
    return outcome.text;
}

struct UsedOften {
    int uses;
    std::vector<float> gradient = std::vector<float>(10);
};

}  // namespace

template <>
struct gradsync::parameter_traits<UsedOften> {
    static std::vector<float>& gradient(UsedOften& t) { return t.gradient; }
    static std::string name(UsedOften&) { return "w"; }
    static int uses(UsedOften& t) { return t.uses; }
};

TEST_CASE("a number of uses that is negative is not taken for a large one") {
    std::vector<float> ten(10);
    const std::string expected = "Reducer on rank 0: parameter 'w' has -1 uses; give it how often a backward marks it, from 1 to 1048576";
    CHECK(refusal_of(ParameterView{.name = "w", .gradient = buffer(ten), .uses = static_cast<std::uint32_t>(-1)}) == expected);
    CHECK(refusal_of(UsedOften{-1}) == expected);
    CHECK(refusal_of(UsedOften{(1 << 20) + 1}).find("has 1048577 uses; give it") != std::string::npos);
    CHECK(refusal_of(UsedOften{1 << 20}) == "");
}

TEST_CASE("values and gradients that are not aligned for their type are refused") {
    alignas(8) std::byte memory[64] = {};
    const auto at = [&](std::size_t place, DType dtype) { return BufferView{memory + place, 2, dtype, MemorySpace::host}; };
    CHECK(refusal_of(ParameterView{.name = "w", .gradient = at(2, DType::f32)}) ==
          "Reducer on rank 0: parameter 'w' has a gradient of f32 at an address that is no multiple of 4; align it for its element "
          "type");
    CHECK(refusal_of(ParameterView{.name = "w", .value = at(1, DType::bf16), .gradient = at(32, DType::f32)})
              .find("has a value of bf16 at an address that is no multiple of 2") != std::string::npos);
    CHECK(refusal_of(ParameterView{.name = "w", .value = at(4, DType::f64), .requires_grad = false}).find("has a value of f64") !=
          std::string::npos);
    CHECK(refusal_of(ParameterView{.name = "w", .value = at(2, DType::bf16), .gradient = at(36, DType::f32)}) == "");
    CHECK(refusal_of(ParameterView{.name = "w", .value = at(3, DType::f8e4m3), .gradient = at(33, DType::f8e4m3)}) == "");
}

TEST_CASE("a shape whose elements cannot be counted says so") {
    std::vector<float> ten(10);
    const std::size_t half = std::size_t{1} << 32;
    const auto of_shape = [&](std::vector<std::size_t> shape, std::size_t count) {
        return refusal_of(
            ParameterView{.name = "w", .gradient = buffer(std::span(ten).first(count)), .shape = std::move(shape), .may_be_empty = true});
    };
    CHECK(
        of_shape({half, half}, 0) ==
        "Reducer on rank 0: parameter 'w' has a shape of more elements than std::size_t counts; look for an extent that is negative or not set");
    CHECK(of_shape({static_cast<std::size_t>(-1), 10}, 10).find("more elements than std::size_t counts") != std::string::npos);
    CHECK(of_shape({half, half, 0}, 0) == "");
    CHECK(of_shape({half, half, 0}, 10).find("a shape of 0 elements, but a gradient of 10") != std::string::npos);
    CHECK(of_shape({2, 5}, 10) == "");
}

TEST_CASE("tied weights that are registered twice are refused") {
    std::vector<float> shared(10);
    const auto refused = [](std::span<float> one, std::span<float> other, bool frozen = false) {
        return outcome_of([&] {
            run_threads(1, [&](ThreadBackend comm) {
                std::vector<float> elsewhere(10);
                const std::vector<ParameterView> views{
                    {.name = "head", .gradient = buffer(one)},
                    {.name = "body", .gradient = buffer(elsewhere)},
                    {.name = "embedding", .gradient = buffer(other), .requires_grad = !frozen, .may_be_empty = true}};
                Reducer sync(comm, views);
            });
        });
    };
    const std::span<float> all(shared);
    for (const Outcome& outcome : {refused(all, all), refused(all, all.subspan(9)), refused(all.first(6), all.subspan(5))}) {
        INFO(outcome.text);
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK(outcome.says("'head' and 'embedding' share memory"));
    }
    CHECK(refused(all.first(5), all.subspan(5)).text == "");
    CHECK(refused(all.subspan(5), all.first(5)).text == "");
    CHECK(refused(all, all.first(0)).text == "");
    CHECK(refused(all, all, true).text == "");
}

TEST_CASE("a gradient in the memory of its own weights is refused") {
    std::vector<float> memory(15);
    const std::span<float> all(memory);
    const auto outcome_with = [&](std::span<float> weights, std::span<float> gradient) {
        return outcomes(1, [&](ThreadBackend comm) { Reducer sync(comm, {parameter("w", weights, gradient)}); })[0];
    };
    for (const Outcome& outcome :
         {outcome_with(all, all), outcome_with(all.first(9), all.last(9)), outcome_with(all.last(9), all.first(9))})
        CHECK(outcome.says("parameter 'w' has a gradient that shares memory with its value; give each its own"));
    CHECK(outcome_with(all.first(7), all.subspan(7, 7)).text == "");
    CHECK(outcome_with(all.subspan(7, 7), all.first(7)).text == "");
}

TEST_CASE("two parameters of one value, with a gradient each, are fine where values are not written") {
    CHECK(findings(2, [](ThreadBackend comm, Finding&) {
              std::vector<float> weights(10), one(10), other(10);
              Reducer sync(comm, std::vector{parameter("embedding", weights, one), parameter("head", weights, other)});
          }) == "");
}

TEST_CASE("gradients without memory of their own live in the buckets") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              const std::vector<ParameterView> views{{.name = "w", .gradient = {nullptr, 10, DType::f32, MemorySpace::host}}};
              Reducer sync(comm, views, {.gradients = GradientStorage::in_buckets});
              for (float& x : sync.gradient_view(0).as<float>()) x = static_cast<float>(comm.rank());
              sync.mark_ready(0);
              sync.finish();
              for (const float x : sync.gradient_view(0).as<float>()) finding.check(x == 0.5f, "not the mean");
          }) == "");
}

TEST_CASE("buckets are allocated once all ranks are known to want the same ones") {
    CHECK(findings(3, [](ThreadBackend comm, Finding& finding) {
              const bool odd = comm.rank() == 1;
              int allocations = 0;
              CountingBackend backend(std::move(comm), allocations);
              auto model = tensors({10, 24, 30}), others = tensors({10, 25, 30});
              const Outcome outcome = outcome_of([&] { Reducer sync(backend, odd ? others : model); });
              finding.check(outcome.is(Errc::parameter_mismatch), "the difference was not found: " + outcome.text);
              finding.check(allocations == 0, "memory was allocated before");
              Reducer sync(backend, model);
              finding.check(allocations == 1, "no memory was allocated, or too often");
          }) == "");
}

TEST_CASE("a hundred thousand parameters are compared in little time") {
    const auto seconds = run_threads(2, [](ThreadBackend comm) {
        std::vector<float> memory(200'000);
        std::vector<ParameterView> views;
        for (std::size_t i = 0; i < 100'000; ++i)
            views.push_back({.name = "layer." + std::to_string(i), .gradient = buffer(std::span(memory).subspan(2 * i, 2))});
        comm.barrier().wait();
        const auto begin = std::chrono::steady_clock::now();
        Reducer sync(comm, views);
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        for (std::size_t i = views.size(); i-- > 0;) sync.mark_ready(i);
        sync.finish();
        return took;
    });
    MESSAGE("construction on 2 ranks took ", 1e3 * seconds[0], " ms");
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {  // ... and the last one differs
              std::vector<float> memory(200'000);
              std::vector<ParameterView> views;
              for (std::size_t i = 0; i < 100'000; ++i)
                  views.push_back({.name = "layer." + std::to_string(i),
                                   .gradient = buffer(std::span(memory).subspan(2 * i, i + 1 == 100'000 && comm.rank() == 1 ? 1 : 2))});
              const Outcome outcome = outcome_of([&] { Reducer sync(comm, views); });
              finding.check(outcome.is(Errc::parameter_mismatch) && outcome.says("'layer.99999' f32 [1]"), outcome.text);
          }) == "");
}
