// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "checkpoints.hpp"

using namespace gradsync;
using namespace gradsync_test;

TEST_CASE("save_shards throws on every rank if one cannot write; the last checkpoint stands, and training goes on") {
    const TemporaryDirectory directory;
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(awkward_sizes, DType::f32);
              One sharded = make_one(comm, model, 0);
              train_alike(sharded, 0, 1);
              save_shards(directory.path(), sharded, "good");
              const auto good = weights(sharded);
              // A directory is where rank 1's next file should be.
              if (comm.rank() == 0) std::filesystem::create_directories(directory.path() / "shard-1-1-of-3.gradsync");
              comm.barrier().wait();
              train_alike(sharded, 1, 2);
              const Outcome outcome = outcome_of([&] { save_shards(directory.path(), sharded, "bad"); });
              finding.check(outcome.is(Errc::storage) && outcome.says("rank 1: ") && outcome.says("cannot be written"),
                            "it says: " + outcome.text);
              const Outcome below = outcome_of([&] { save_shards(directory.path() / "shard-0-0-of-3.gradsync" / "below", sharded); });
              finding.check(below.says("cannot be made: Not a directory; choose one where this user may write"), "it says: " + below.text);
              train_alike(sharded, 2, 3);
              finding.check(load_shards(directory.path(), sharded) == "good", "the note is another");
              finding.check(weights(sharded) == good, "the weights are not those that were saved");
          }) == "");
}

TEST_CASE("save_shards on one rank only is among the calls that every rank's error names") {
    const TemporaryDirectory directory;
    const auto seen = outcomes(2, [&](ThreadBackend comm) {
        auto model = initial_tensors(awkward_sizes, DType::f32);
        One sharded = make_one(comm, model, 0);
        train_alike(sharded, 0, 1);
        if (comm.rank() == 0) save_shards(directory.path(), sharded);
        train_alike(sharded, 1, 2);
    });
    for (const Outcome& outcome : seen) {
        INFO(outcome.text);
        CHECK(outcome.is(Errc::collective_mismatch));
        CHECK(outcome.says("rank 0 started all_gather("));
        CHECK(outcome.says(
            "for a call outside of buckets (of your own, average, broadcast_parameters, begin_step, gradient_norm, save_shards)"));
        CHECK(outcome.says("rank 1 started reduce_scatter("));
    }
}

TEST_CASE("two jobs do not save to one directory at the same time: every rank of the later one throws") {
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

TEST_CASE("save_shards on a full disk throws on every rank, and leaves nothing but the last checkpoint") {
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

TEST_CASE("ShardSave::finish throws on every rank if one could not write, once; the last checkpoint stands, and training goes on") {
    const TemporaryDirectory directory;
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(awkward_sizes, DType::f32);
              One sharded = make_one(comm, model, 0);
              save_shards(directory.path(), sharded, "good");
              if (comm.rank() == 0) std::filesystem::create_symlink("/dev/full", directory.path() / "shard-1-1-of-2.gradsync");
              comm.barrier().wait();
              ShardSave save(directory.path(), sharded, "bad");
              train_alike(sharded, 0, 1);
              const Outcome outcome = outcome_of([&] { save.finish(); });
              finding.check(outcome.is(Errc::storage) && outcome.says("rank 1: ") && outcome.says("No space left on device"),
                            "it says: " + outcome.text);
              const Outcome again = outcome_of([&] { save.finish(); });
              finding.check(again.is(Errc::invalid_argument) && again.says("make an object for each checkpoint"), "it says: " + again.text);
              comm.barrier().wait();
              finding.check(files_in(directory) == 3, std::to_string(files_in(directory)) + " files");
              finding.check(load_shards(directory.path(), sharded) == "good", "the note is another");
              save_shards(directory.path(), sharded, "later");  // the failed one keeps nobody from it
          }) == "");
}

TEST_CASE("save_shards throws on every rank if a pipe stands where it would write, and waits for no reader") {
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
