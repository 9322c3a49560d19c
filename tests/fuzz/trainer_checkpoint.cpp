// SPDX-License-Identifier: BSL-1.0
// The checkpoint of the example trainer: the input is the file, as it is or with a digest that is right.
#include "checkpoint.hpp"
#include "fuzz.hpp"

namespace {

using namespace gradsync_train;

class Reads final : public Synchroniser {
public:
    void restore(std::uint64_t, const StateSource& source) override {
        std::vector<float> values(7);
        for (std::size_t array = 0; array < 3; ++array) source({0, array, 0}, values), source({1, array, 2}, std::span(values).first(3));
    }
    void begin_backward(std::size_t) override {}
    void end_backward() override {}
    void step(double) override {}
    void flush() override {}
    void add_up(std::span<double>) override {}
    std::vector<RankSummary> gather(const RankSummary&) override { return {}; }
    void collect(const StateSink&) override {}
    StateViews state_views() override { return {}; }
    void state_was_written(std::uint64_t) override {}
    const gs::Statistics& statistics() const override { return statistics_; }
    MemoryUse memory() const override { return {}; }
    void enter(std::size_t) override {}
    void leave(std::size_t) override {}
    float* gradient(std::size_t) override { return nullptr; }
    void ready(std::size_t) override {}

private:
    gs::Statistics statistics_;
};

}  // namespace

static const gradsync_fuzz::Target target("trainer_checkpoint", [](gradsync_fuzz::Input input) {
    const bool sealed = input.take<std::uint8_t>() % 2 == 0;
    std::string bytes = input.text();
    if (sealed) bytes += gradsync_fuzz::bytes_of(Digest{}.update(bytes.data(), bytes.size()).value());
    gradsync_fuzz::write_file(checkpoint_file(gradsync_fuzz::directory()), {bytes});
    const Checkpoint checkpoint(gradsync_fuzz::directory());
    (void)checkpoint.progress();
    Parameters parameters(1);
    parameters.add_constant("a", {7}, 0);
    parameters.add_constant("b", {5}, 0);
    Reads reads;
    try {
        checkpoint.expect_model("a model");
    } catch (const UsageError&) {
    }
    checkpoint.restore(parameters, 3, reads);
});
