// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

// A program may have a global function of this name before it includes the library.
bool close(double, double);

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"
#include "support/temporary_directory.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

std::size_t files_in(const TemporaryDirectory& directory) {
    std::size_t n = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory.path())) ++n;
    return n;
}

using One = ShardedOptimizer<ThreadBackend, AdamW, Zero1>;
using Three = ShardedParameters<ThreadBackend, AdamW>;

One make_one(ThreadBackend comm, std::vector<Tensor>& model, int steps) {
    return One(comm, model, AdamW{.steps = steps}, {}, SizeCappedBuckets(4000));
}
Three make_three(ThreadBackend comm, std::vector<Tensor>& model, int steps) {
    return Three(comm, model, AdamW{.steps = steps}, awkward_units);
}

/// Steps with the same data on every rank, so that the number of ranks does not matter (where it is a power of two).
template <class Sharded>
void train(Sharded& sharded, int first, int last) {
    for (int s = first; s < last; ++s) {
        for (std::size_t i = sharded.parameters().size(); i-- > 0;) {
            const auto mark = [&] {
                write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), 0, s, i);
                sharded.mark_ready(i);
            };
            if constexpr (requires { sharded.gather(0); }) {
                const auto use = sharded.gather(sharded.unit_of(i));
                mark();
            } else {
                mark();
            }
        }
        sharded.finish();
        sharded.step();
    }
}

/// Another checkpoint is saved between the digests and the records of the one that is loaded.
struct Replaced {
    One& own;
    const std::filesystem::path& directory;
    int saves = 0;

    auto backend() { return own.backend(); }
    auto parameters() const { return own.parameters(); }
    void flush() { own.flush(); }
    void publish() { own.publish(); }
    template <class F>
    void with_replicas(F&& f) const {
        own.with_replicas(f);
    }
    template <class F>
    void for_each_shard(F&& f) {
        if (saves++ == 0) save_shards(directory, own, "newer");
        own.for_each_shard(f);
    }
};

}  // namespace

TEST_CASE("what p ranks of one stage write, q ranks of another go on from, to the same bits") {
    for (const DType dtype : {DType::f32, DType::bf16}) {
        std::vector<Bytes> expected;
        run_threads(1, [&](ThreadBackend comm) {
            auto model = initial_tensors(awkward_sizes, dtype);
            One alone = make_one(comm, model, 0);
            train(alone, 0, 5);
            expected = weights(alone);
        });
        for (const bool from_three : {false, true})
            for (const int from : {1, 2, 4}) {
                const TemporaryDirectory directory;
                run_threads(from, [&](ThreadBackend comm) {
                    auto model = initial_tensors(awkward_sizes, dtype);
                    const auto run = [&](auto&& sharded) {
                        for (int s = 0; s < 3; ++s) {
                            train(sharded, s, s + 1);
                            save_shards(directory.path(), sharded, "after " + std::to_string(s + 1));
                        }
                    };
                    if (from_three) run(make_three(comm, model, 0));
                    else run(make_one(comm, model, 0));
                });
                CHECK(files_in(directory) == static_cast<std::size_t>(from) + 1);  // those of older checkpoints are gone
                for (const bool to_three : {false, true})
                    for (const int to : {1, 2, 4}) {
                        CAPTURE(from);
                        CAPTURE(to);
                        CAPTURE(from_three);
                        CAPTURE(to_three);
                        CHECK(findings(to, [&](ThreadBackend comm, Finding& finding) {
                                  auto model = tensors(awkward_sizes, dtype);
                                  const auto run = [&](auto&& sharded) {
                                      finding.check(load_shards(directory.path(), sharded) == "after 3", "the note is another");
                                      train(sharded, 3, 5);
                                      finding.check(first_difference(expected, weights(sharded)).empty(),
                                                    first_difference(expected, weights(sharded)) + " differs");
                                  };
                                  if (to_three) run(make_three(comm, model, 3));
                                  else run(make_one(comm, model, 3));
                              }) == "");
                    }
            }
    }
}

namespace {

/// Its weights are rounded stochastically, with the number of steps as the seed.
struct RoundingAdamW : AdamW {
    void round(const RoundingSlice& s) const { round_stochastically(s, static_cast<std::uint64_t>(steps)); }
};

}  // namespace

TEST_CASE("an optimizer that rounds goes on to the same bits once its scalars are back and publish() was called") {
    const TemporaryDirectory directory;
    const auto check = [&](auto make) {
        return findings(2, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(awkward_sizes, DType::bf16), other = model;
            auto whole = make(comm, model);
            train(*whole, 0, 2);
            save_shards(directory.path(), *whole, std::to_string(whole->optimizer().steps));
            const auto saved = weights(*whole);
            train(*whole, 2, 4);

            auto resumed = make(comm, other);
            resumed->optimizer().steps = std::stoi(load_shards(directory.path(), *resumed));
            resumed->publish();
            finding.check(first_difference(saved, weights(*resumed)).empty(), "loaded: " + first_difference(saved, weights(*resumed)));
            train(*resumed, 2, 4);
            const std::string found = first_difference(weights(*whole), weights(*resumed));
            finding.check(found.empty(), "resumed: " + found);
        });
    };
    CHECK(check([](ThreadBackend comm, auto& model) {
              return std::make_unique<ShardedOptimizer<ThreadBackend, RoundingAdamW>>(comm, model, RoundingAdamW{});
          }) == "");
    CHECK(check([](ThreadBackend comm, auto& model) {
              return std::make_unique<ShardedParameters<ThreadBackend, RoundingAdamW>>(comm, model, RoundingAdamW{}, awkward_units);
          }) == "");
}

TEST_CASE("broadcast_parameters() after a load keeps what was loaded, in every stage, however often it is called") {
    const TemporaryDirectory directory;
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(awkward_sizes, DType::f32), one = model, three = model;
              One trained = make_one(comm, model, 0);
              train(trained, 0, 2);
              save_shards(directory.path(), trained);
              const auto expected = weights(trained);
              const auto check = [&](auto loaded, const char* stage) {
                  (void)load_shards(directory.path(), loaded);
                  for (int k = 0; k < 2; ++k) loaded.broadcast_parameters();
                  finding.check(first_difference(expected, weights(loaded)).empty(), stage);
              };
              check(make_one(comm, one, 0), "stage 1 differs");
              check(make_three(comm, three, 0), "stage 3 differs");
          }) == "");
}

TEST_CASE("a parameter that was trained and is frozen gets its saved weights on all ranks; one of another training is named") {
    const TemporaryDirectory directory;
    for (const DType dtype : {DType::f32, DType::bf16})
        CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors({4000, 300000}, dtype), frozen = model, fewer = initial_tensors({4000}, dtype);
                  One trained = make_one(comm, model, 0);
                  train(trained, 0, 2);
                  save_shards(directory.path(), trained);
                  std::vector<ParameterView> views = {parameter_view(frozen[0]), parameter_view(frozen[1])};
                  views[1].requires_grad = false;
                  ShardedOptimizer<ThreadBackend, AdamW> loaded(comm, views, AdamW{});
                  (void)load_shards(directory.path(), loaded);
                  for (std::size_t i = 0; i < 2; ++i) finding.check(frozen[i].value == model[i].value, model[i].name + " differs");
                  ShardedOptimizer<ThreadBackend, AdamW> other(comm, fewer, AdamW{});
                  finding.check(outcome_of([&] {
                                    (void)load_shards(directory.path(), other);
                                }).says("has '" + model[1].name + "', and this training has no parameter of that name"),
                                "not refused");
              }) == "");
}

TEST_CASE("a rank that cannot write: every rank is told, the last checkpoint stands, training goes on") {
    const TemporaryDirectory directory;
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(awkward_sizes, DType::f32);
              One sharded = make_one(comm, model, 0);
              train(sharded, 0, 1);
              save_shards(directory.path(), sharded, "good");
              const auto good = weights(sharded);
              // A directory is where rank 1's next file should be.
              if (comm.rank() == 0) std::filesystem::create_directories(directory.path() / "shard-1-1-of-3.gradsync");
              comm.barrier().wait();
              train(sharded, 1, 2);
              const Outcome outcome = outcome_of([&] { save_shards(directory.path(), sharded, "bad"); });
              finding.check(outcome.is(Errc::storage) && outcome.says("rank 1: ") && outcome.says("cannot be written"),
                            "it says: " + outcome.text);
              const Outcome below = outcome_of([&] { save_shards(directory.path() / "shard-0-0-of-3.gradsync" / "below", sharded); });
              finding.check(below.says("cannot be made: Not a directory; choose one where this user may write"), "it says: " + below.text);
              train(sharded, 2, 3);
              finding.check(load_shards(directory.path(), sharded) == "good", "the note is another");
              finding.check(weights(sharded) == good, "the weights are not those that were saved");
          }) == "");
}

TEST_CASE("two jobs do not save to one directory at the same time: every rank of the later one is told") {
    const TemporaryDirectory directory;
    for (const int ranks : rank_counts(1, 3)) {
        const int other_job = ::open(directory.path().c_str(), O_RDONLY | O_DIRECTORY);
        REQUIRE(::flock(other_job, LOCK_EX) == 0);
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(awkward_sizes, DType::f32);
                  One sharded = make_one(comm, model, 0);
                  const Outcome outcome = outcome_of([&] { save_shards(directory.path(), sharded, "late"); });
                  finding.check(outcome.is(Errc::storage) && outcome.says("where another job saves a checkpoint now"),
                                "it says: " + outcome.text);
                  comm.barrier().wait();
                  if (comm.rank() == 0) ::close(other_job);
                  comm.barrier().wait();
                  for (int i = 0; i < 2; ++i) save_shards(directory.path(), sharded, "later");
                  finding.check(load_shards(directory.path(), sharded) == "later", "the note is another");
              }) == "");
    }
}

TEST_CASE("a full disk: every rank is told, and nothing is left but the last checkpoint") {
    for (const char* const name : {"shard-1-1-of-2.gradsync", "manifest.gradsync.new"}) {
        const TemporaryDirectory directory;
        CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(awkward_sizes, DType::f32);
                  One sharded = make_one(comm, model, 0);
                  save_shards(directory.path(), sharded, "good");
                  if (comm.rank() == 0) std::filesystem::create_symlink("/dev/full", directory.path() / name);
                  comm.barrier().wait();
                  const Outcome outcome = outcome_of([&] { save_shards(directory.path(), sharded, "bad"); });
                  finding.check(outcome.is(Errc::storage) && outcome.says("No space left on device; look at its owner and the space left"),
                                "it says: " + outcome.text);
                  comm.barrier().wait();
                  finding.check(files_in(directory) == 3, std::to_string(files_in(directory)) + " files");
                  finding.check(load_shards(directory.path(), sharded) == "good", "the note is another");
              }) == "");
    }
}

TEST_CASE("a pipe where a file of the next checkpoint should be: every rank is told, and none waits for its reader") {
    for (const char* const name : {"shard-1-1-of-2.gradsync", "manifest.gradsync.new"}) {
        const TemporaryDirectory directory;
        CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(awkward_sizes, DType::f32);
                  One sharded = make_one(comm, model, 0);
                  save_shards(directory.path(), sharded, "good");
                  if (comm.rank() == 0) ::mkfifo((directory.path() / name).c_str(), 0600);
                  comm.barrier().wait();
                  const Outcome outcome = outcome_of([&] { save_shards(directory.path(), sharded, "bad"); });
                  finding.check(outcome.is(Errc::storage) && outcome.says("cannot be written: it is not a regular file; remove it"),
                                "it says: " + outcome.text);
                  finding.check(load_shards(directory.path(), sharded) == "good", "the note is another");
              }) == "");
    }
}

TEST_CASE("parts that no manifest names go with the next save, and nothing else does") {
    const TemporaryDirectory directory;
    const auto save = [&] {
        run_threads(2, [&](ThreadBackend comm) {
            auto model = initial_tensors({10, 20}, DType::f32);
            One sharded = make_one(comm, model, 0);
            save_shards(directory.path(), sharded);
        });
    };
    save();
    for (const char* const part : {"shard-1-0-of-5.gradsync", "shard-7-1-of-2.gradsync", "shard-18446744073709551615-0-of-1.gradsync"})
        std::ofstream(directory.file(part)) << "left by a save that was killed";
    const std::vector<std::string> others = {"shard-7-1-of-2.gradsync.old", "a shard-7-1-of-2.gradsync", "shard-07-1-of-2.gradsync",
                                             "shard-7-1-of-2", "weights"};
    for (const std::string& other : others) std::ofstream(directory.path() / other) << "the user's";
    std::filesystem::create_directory(directory.path() / "shard-8-0-of-2.gradsync");
    save();
    for (const std::string& other : others) CHECK(std::filesystem::exists(directory.path() / other));
    CHECK(files_in(directory) == 3 + others.size() + 1);
}

TEST_CASE("a directory that the ranks do not share is noticed, when they save and when they load") {
    const TemporaryDirectory directories[2];
    const auto seen = outcomes(2, [&](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        One sharded = make_one(comm, model, 0);
        save_shards(directories[comm.rank()].path(), sharded);
    });
    for (const Outcome& outcome : seen) CHECK(outcome.says("of rank 1 cannot be seen from rank 0; all machines must share the directory"));
    for (const auto& directory : directories) {
        CHECK(files_in(directory) == 0);
        run_threads(1, [&](ThreadBackend comm) {
            auto model = initial_tensors({10, 20}, DType::f32);
            One sharded = make_one(comm, model, 0);
            save_shards(directory.path(), sharded, &directory == directories ? "newer" : "older");
        });
    }
    for (const Outcome& outcome : outcomes(2, [&](ThreadBackend comm) {
             auto model = initial_tensors({10, 20}, DType::f32);
             One sharded = make_one(comm, model, 0);
             load_shards(directories[comm.rank()].path(), sharded);
         }))
        CHECK(outcome.says("manifest.gradsync differs between rank 0 and rank 1; all machines must share the directory"));
}

TEST_CASE("a checkpoint that is replaced while it is loaded: the new one is loaded") {
    const TemporaryDirectory directory;
    run_threads(1, [&](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        One sharded = make_one(comm, model, 0);
        save_shards(directory.path(), sharded, "older");
        Replaced replaced{sharded, directory.path()};
        CHECK(load_shards(directory.path(), replaced) == "newer");
    });
}

TEST_CASE("a checkpoint that was made to mislead is refused: parts that overlap, sizes that wrap around") {
    const TemporaryDirectory directory;
    struct Part {
        const char* name;
        std::uint64_t whole, first, count, arrays;
    };
    const auto load = [&](const std::vector<Part>& parts, std::uint64_t records) {
        return outcome_of([&] {
            run_threads(1, [&](ThreadBackend comm) {
                auto model = initial_tensors({10}, DType::f32);
                ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, model, Sgd{});
                save_shards(directory.path(), sharded);
                auto manifest = detail::ShardManifest::read(directory.path());
                detail::ShardWriter out(manifest.file(directory.path(), 0));
                out.number(records);
                for (const Part& part : parts) {
                    out.text(part.name);
                    out.text("");  // shape
                    for (const std::uint64_t x : {part.whole, static_cast<std::uint64_t>(DType::f32), part.first, part.count, part.arrays})
                        out.number(x);
                    if (part.count > 100) continue;
                    const std::vector<float> data(part.count * part.arrays);
                    out.bytes(data.data(), data.size() * sizeof(float));
                }
                manifest.digests[0] = out.finish();
                manifest.write(directory.path());
                load_shards(directory.path(), sharded);
            });
        });
    };
    const auto model = initial_tensors({10}, DType::f32);
    const std::string name = model[0].name;
    const std::uint64_t arrays = 1 + Sgd{}.state_count();
    CHECK(load({{name.c_str(), 10, 0, 5, arrays}, {name.c_str(), 10, 5, 5, arrays}}, 2).text == "");
    CHECK(load({{name.c_str(), 10, 0, 5, arrays}, {name.c_str(), 10, 0, 5, arrays}}, 2).says("overlap"));
    CHECK(load({{name.c_str(), 10, 5, 5, arrays}, {name.c_str(), 10, 0, 5, arrays}}, 2).says("do not follow one another"));
    const std::uint64_t back = (std::uint64_t{1} << 62) - 17;  // times 4 bytes: 68 bytes before
    CHECK(load({{"other", back, 0, back, 1}}, std::uint64_t{1} << 40).says("is torn or damaged"));
}

TEST_CASE("files that are torn, missing or of something else are refused on every rank") {
    const auto refused = [](auto&& spoil) {
        const TemporaryDirectory directory;
        run_threads(2, [&](ThreadBackend comm) {
            auto model = initial_tensors(awkward_sizes, DType::f32);
            One sharded = make_one(comm, model, 0);
            save_shards(directory.path(), sharded);
        });
        spoil(directory.path());
        const auto seen = outcomes(2, [&](ThreadBackend comm) {
            auto model = initial_tensors(awkward_sizes, DType::f32);
            One sharded = make_one(comm, model, 0);
            load_shards(directory.path(), sharded);
        });
        CHECK(seen[0].is(Errc::storage));
        CHECK(seen[0].text == seen[1].text);
        return seen[0].text;
    };
    const auto says = [](const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; };
    const char* const shard = "shard-0-1-of-2.gradsync";
    CHECK(says(refused([&](auto& d) { std::filesystem::resize_file(d / shard, 1000); }), "is torn or damaged"));
    CHECK(says(refused([&](auto& d) { std::fstream(d / shard, std::ios::in | std::ios::out).seekp(600).put('x'); }), "is torn or damaged"));
    CHECK(says(refused([&](auto& d) { std::filesystem::remove(d / shard); }), "cannot be read: No such file"));
    CHECK(says(refused([&](auto& d) { std::filesystem::remove(d / "manifest.gradsync"); }), "manifest.gradsync cannot be read"));
    CHECK(says(refused([&](auto& d) { std::ofstream(d / "manifest.gradsync") << "something else, long enough"; }), "is not the manifest"));
    for (const char* const name : {shard, "manifest.gradsync"}) {
        const auto replaced = [&](auto&& by) {
            return refused([&](auto& d) {
                std::filesystem::remove(d / name);
                by(d / name);
            });
        };
        const std::string words = std::string(name) + " cannot be read: it is not a regular file; load another checkpoint";
        CHECK(says(replaced([](const auto& path) { ::mkfifo(path.c_str(), 0600); }), words));
        CHECK(says(replaced([](const auto& path) { std::filesystem::create_directory(path); }), words));
        CHECK(says(replaced([](const auto& path) { std::filesystem::create_symlink("/dev/zero", path); }), words));
    }

    // Of another model.
    const TemporaryDirectory directory;
    run_threads(1, [&](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        One sharded = make_one(comm, model, 0);
        save_shards(directory.path(), sharded);
    });
    const auto load = [&](const std::vector<std::size_t>& counts) {
        return outcomes(1,
                        [&](ThreadBackend comm) {
                            auto model = initial_tensors(counts, DType::f32);
                            One sharded = make_one(comm, model, 0);
                            load_shards(directory.path(), sharded);
                        })[0]
            .text;
    };
    CHECK(says(load({10, 21}), "has 'p1' with 20 elements of f32 and 3 arrays; this training has 21 of f32 and 3"));
    CHECK(says(load({10, 20, 5}), "it does not have all of 'p2'"));

    const auto with_shape = [](const std::vector<std::size_t>& shape, auto&& use) {
        return outcomes(2,
                        [&](ThreadBackend comm) {
                            std::vector<float> w(12), g(12);
                            ShardedOptimizer sharded(comm, std::vector{parameter("p0", w, g, shape)}, AdamW{});
                            use(sharded);
                        })[1]
            .text;
    };
    const TemporaryDirectory shaped;
    CHECK(with_shape({3, 4}, [&](auto& sharded) { save_shards(shaped.path(), sharded); }) == "");
    const auto load_it = [&](auto& sharded) { load_shards(shaped.path(), sharded); };
    CHECK(with_shape({3, 4}, load_it) == "");
    CHECK(with_shape({}, load_it) == "");
    CHECK(says(with_shape({4, 3}, load_it), "has 'p0' of shape [3, 4]; this training has it of shape [4, 3]"));

    const auto same_names = outcomes(2, [&](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        model[1].name = model[0].name;
        One sharded = make_one(comm, model, 0);
        save_shards(directory.path(), sharded);
    });
    for (const Outcome& outcome : same_names) CHECK(outcome.says("two parameters are named 'p0'"));
}
