// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

// A program may have a global function of this name before it includes the library.
bool close(double, double);

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "checkpoints.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Another checkpoint is saved between the digests and the records of the one that is loaded.
struct Replaced {
    One& own;
    const std::filesystem::path& directory;
    int saves = 0;

    auto backend() { return own.backend(); }
    auto parameters() const { return own.parameters(); }
    void flush() { own.flush(); }
    void publish() { own.publish(); }
    friend void with_replicas(const Replaced& sharded, auto&& f) { with_replicas(sharded.own, f); }
    friend void check_loadable(const Replaced& sharded) { check_loadable(sharded.own); }
    template <class F>
    void for_each_shard(F&& f) {
        if (saves++ == 0) save_shards(directory, own, "newer");
        own.for_each_shard(f);
    }
};

}  // namespace

TEST_CASE("q ranks of one stage go on from what p ranks of another wrote, to the same bits") {
    for (const DType dtype : {DType::f32, DType::bf16}) {
        std::vector<Bytes> expected;
        run_threads(1, [&](ThreadBackend comm) {
            auto model = initial_tensors(awkward_sizes, dtype);
            One alone = make_one(comm, model, 0);
            train_alike(alone, 0, 5);
            expected = weights(alone);
        });
        for (const bool from_three : {false, true})
            for (const int from : {1, 2, 4}) {
                const TemporaryDirectory directory;
                run_threads(from, [&](ThreadBackend comm) {
                    auto model = initial_tensors(awkward_sizes, dtype);
                    const auto run = [&](auto&& sharded) {
                        for (int s = 0; s < 3; ++s) {
                            train_alike(sharded, s, s + 1);
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
                                      train_alike(sharded, 3, 5);
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

TEST_CASE("ShardSave writes what save_shards writes, of the moment when it was made; before finish() the older checkpoint counts") {
    for (const bool three : {false, true})
        for (const int ranks : {1, 2, 3, 4}) {
            CAPTURE(three);
            CAPTURE(ranks);
            const TemporaryDirectory at_once, meanwhile;
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = initial_tensors(awkward_sizes, DType::f32);
                      const auto run = [&](auto&& sharded) {
                          save_shards(meanwhile.path(), sharded, "older");
                          save_shards(at_once.path(), sharded, "older");
                          train_alike(sharded, 0, 2);
                          save_shards(at_once.path(), sharded, "newer");
                          const auto saved = weights(sharded);
                          {
                              const ShardSave dropped(meanwhile.path(), sharded, "dropped");
                              train_alike(sharded, 2, 3);
                          }
                          comm.barrier().wait();
                          finding.check(files_in(meanwhile) == static_cast<std::size_t>(ranks) + 1, "a dropped one leaves files");
                          finding.check(load_shards(at_once.path(), sharded) == "newer", "the note is another");
                          ShardSave save(meanwhile.path(), sharded, "newer");
                          train_alike(sharded, 2, 4);
                          finding.check(load_shards(meanwhile.path(), sharded) == "older", "it counts before finish()");
                          train_alike(sharded, 0, 1);
                          save.finish();
                          finding.check(load_shards(meanwhile.path(), sharded) == "newer", "the note is another");
                          finding.check(weights(sharded) == saved, "the weights are not those of the moment");
                      };
                      if (three) run(make_three(comm, model, 0));
                      else run(make_one(comm, model, 0));
                  }) == "");
            for (const auto& entry : std::filesystem::directory_iterator(at_once.path())) {
                const auto content = [](const std::filesystem::path& path) {
                    std::ifstream in(path, std::ios::binary);
                    return std::string(std::istreambuf_iterator<char>(in), {});
                };
                CHECK(content(entry.path()) == content(meanwhile.path() / entry.path().filename()));
            }
        }
}

namespace {

/// Its weights are rounded stochastically, with the number of steps as the seed.
struct RoundingAdamW : AdamW {
    void round(const RoundingSlice& s) const { round_stochastically(s, static_cast<std::uint64_t>(steps)); }
};

}  // namespace

TEST_CASE("ShardSave: if one rank cannot copy its shards, all ranks say so, and can go on") {
    struct Stubborn : AdamW {
        bool refuses = false;
        std::size_t state_count() const { return refuses ? throw std::runtime_error("it does not tell its arrays") : AdamW::state_count(); }
    };
    const TemporaryDirectory directory;
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(awkward_sizes, DType::f32);
              ShardedOptimizer sharded(comm, model, Stubborn{});
              sharded.optimizer().refuses = comm.rank() == 1;
              const Outcome outcome = outcome_of([&] { ShardSave save(directory.path(), sharded); });
              finding.check(outcome.says("rank 1: it does not tell its arrays"), outcome.text);
              sharded.optimizer().refuses = false;
              ShardSave save(directory.path(), sharded);
              save.finish();
          }) == "");
    CHECK(files_in(directory) == 4);
}

TEST_CASE("ShardSave: a forked child neither ends the checkpoint of its parent, nor keeps the directory locked") {
    for (const bool destroys : {false, true}) {
        CAPTURE(destroys);
        const TemporaryDirectory directory;
        CHECK(findings(1, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(awkward_sizes, DType::f32);
                  One sharded = make_one(comm, model, 0);
                  std::optional<ShardSave> save;
                  save.emplace(directory.path(), sharded, "of the parent");
                  int done[2] = {-1, -1};
                  finding.check(::pipe(done) == 0, "no pipe");
                  const pid_t child = ::fork();
                  if (child == 0) {
                      ::alarm(60);
                      if (destroys) save.reset();
                      (void)!::write(done[1], "d", 1);
                      for (;;) ::pause();
                  }
                  char word = 0;
                  finding.check(::read(done[0], &word, 1) == 1, "the child says nothing");
                  save->finish();
                  save.reset();
                  finding.check(load_shards(directory.path(), sharded) == "of the parent", "the checkpoint is another");
                  save_shards(directory.path(), sharded, "the next");
                  ::kill(child, SIGKILL);
                  ::waitpid(child, nullptr, 0);
                  for (const int end : done) ::close(end);
              }) == "");
    }
}

TEST_CASE("a state is not loaded between finish() and step(); after discard() the averages count no more") {
    const TemporaryDirectory directory;
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors(awkward_sizes, DType::f32);
              One sharded = make_one(comm, model, 0);
              save_shards(directory.path(), sharded, "saved");
              const auto saved = weights(sharded);
              for (std::size_t i = model.size(); i-- > 0;) {
                  write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), 0, i);
                  sharded.mark_ready(i);
              }
              sharded.finish();
              const auto nothing = [](std::size_t, std::size_t, std::size_t, BufferView) {};
              for (const Outcome& outcome :
                   {outcome_of([&] { load_shards(directory.path(), sharded); }), outcome_of([&] { sharded.distribute_state(0, nothing); })})
                  finding.check(outcome.is(Errc::invalid_argument) && outcome.says("call step() or discard() first"), outcome.text);
              sharded.discard();
              finding.check(load_shards(directory.path(), sharded) == "saved", "the note is another");
              finding.check(weights(sharded) == saved, "the weights are not those that were saved");
          }) == "");
}

TEST_CASE("an optimizer that rounds goes on to the same bits once its scalars are back and publish() was called") {
    const TemporaryDirectory directory;
    const auto check = [&](auto make) {
        return findings(2, [&](ThreadBackend comm, Finding& finding) {
            auto model = initial_tensors(awkward_sizes, DType::bf16), other = model;
            auto whole = make(comm, model);
            train_alike(*whole, 0, 2);
            save_shards(directory.path(), *whole, std::to_string(whole->optimizer().steps));
            const auto saved = weights(*whole);
            train_alike(*whole, 2, 4);

            auto resumed = make(comm, other);
            resumed->optimizer().steps = std::stoi(load_shards(directory.path(), *resumed));
            resumed->publish();
            finding.check(first_difference(saved, weights(*resumed)).empty(), "loaded: " + first_difference(saved, weights(*resumed)));
            train_alike(*resumed, 2, 4);
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
              train_alike(trained, 0, 2);
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
                  train_alike(trained, 0, 2);
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

TEST_CASE("load_shards loads the new checkpoint if the old one is replaced meanwhile") {
    const TemporaryDirectory directory;
    run_threads(1, [&](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        One sharded = make_one(comm, model, 0);
        save_shards(directory.path(), sharded, "older");
        Replaced replaced{sharded, directory.path()};
        CHECK(load_shards(directory.path(), replaced) == "newer");
    });
}

TEST_CASE("a save writes to no file of an earlier save that was ended: a rank that was stopped may still write there") {
    const TemporaryDirectory directory;
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({10, 20}, DType::f32);
              One sharded = make_one(comm, model, 0);
              for (const char* const ended : {"shard-0-1-of-2.gradsync", "shard-2-0-of-3.gradsync"}) {
                  std::ofstream slow;
                  if (comm.rank() == 0) slow.open(directory.path() / ended);
                  comm.barrier().wait();
                  save_shards(directory.path(), sharded, ended);
                  if (comm.rank() == 0) slow << "the part of a rank that was stopped" << std::flush;
                  comm.barrier().wait();
                  finding.check(load_shards(directory.path(), sharded) == ended, "the note is another");
              }
          }) == "");
    CHECK(files_in(directory) == 3);
    CHECK(std::filesystem::exists(directory.path() / "shard-3-0-of-2.gradsync"));
}
