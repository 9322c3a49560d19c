// SPDX-License-Identifier: BSL-1.0
#include "trainee.hpp"

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "batch.hpp"
#include "data.hpp"
#include "measure.hpp"
#include "mlp.hpp"
#include "ops_cpu.hpp"
#include "transformer.hpp"

namespace bench {

namespace {

/// Bytes that have nothing to teach: that takes as long as any text.
std::vector<std::uint8_t> random_text() {
    std::vector<std::uint8_t> text(std::size_t{1} << 18);
    trainer::Random random(1);
    for (std::uint8_t& byte : text) byte = static_cast<std::uint8_t>(random.next());
    return text;
}

template <class Model>
class TraineeOf final : public Trainee {
public:
    /// The rank sees samples of its own, the same under every strategy.
    TraineeOf(const trainer::Options& options, int rank)
        : model_(config(options)),
          text_(random_text()),
          samples_(text_, model_.config().reading(), static_cast<std::uint64_t>(rank)),
          batch_{.sequences = options.micro_batch} {}

    void learn(const trainer::Options& options, const trainer::MakeSynchroniser& make, std::unique_ptr<gradsync::Timeline> timeline,
               std::function<void()> meet) override {
        // In the first steps memory is touched for the first time; optimal buckets are planned before the fifth.
        const int first_steps = options.buckets == "optimal" ? 5 : 2;
        auto& course = courses_.emplace_back();
        course.timeline = std::move(timeline);
        course.meet = std::move(meet);
        for (std::size_t i = 0; i < model_.parameters().size(); ++i) model_.parameters().bind(i, nullptr);
        course.sync = make(model_.parameters(), model_.units());
        for (std::size_t i = 0; i < model_.parameters().size(); ++i) course.weights.push_back(model_.parameters().value(i));
        train(courses_.size() - 1, first_steps);
        course.exposed.clear();
        course.communication.clear();
    }

    void train(std::size_t which, int steps) override {
        Course& course = courses_[which];
        for (std::size_t i = 0; i < course.weights.size(); ++i) model_.parameters().bind(i, course.weights[i]);
        model_.set_access(course.sync.get());
        for (int i = 0; i < steps; ++i) step(course);
    }

    void end() override {
        for (Course& course : courses_) course.sync->flush();
    }

    Observed observed(std::size_t which) const override {
        const Course& course = courses_[which];
        const trainer::MemoryUse memory = course.sync->memory();
        return {summarise(course.exposed).median, summarise(course.communication).median,
                static_cast<double>(memory.parameters + memory.gradients + memory.optimizer), course.second_loss};
    }
    const trainer::Synchroniser& synchroniser(std::size_t which) const override { return *courses_[which].sync; }

private:
    using Scope = gradsync::Timeline::Scope;

    struct Course {
        std::unique_ptr<gradsync::Timeline> timeline;  // before who writes into it
        std::function<void()> meet;
        std::unique_ptr<trainer::Synchroniser> sync;
        std::vector<const float*> weights;  // by parameter, where they are between steps
        std::uint64_t samples_seen = 0, steps = 0;
        double second_loss = 0;
        std::vector<double> exposed, communication;
    };

    static typename Model::Config config(const trainer::Options& options) {
        typename Model::Config config;
        options.model_config(config);
        return config;
    }

    void step(Course& course) {
        samples_.fill(course.samples_seen, batch_);
        course.samples_seen += batch_.sequences;
        gradsync::Timeline* const timeline = course.timeline.get();  // with the scopes that the trainer has
        const double loss = [&] {
            const Scope scope{timeline, "forward"};
            return model_.forward(batch_);
        }();
        if (!std::isfinite(loss)) throw std::runtime_error("the training diverges");
        {
            const Scope scope{timeline, "backward"};
            course.sync->begin_backward(0);
            model_.backward(batch_, *course.sync);
            course.sync->end_backward();
            if (course.meet) course.meet();
        }
        {
            const Scope scope{timeline, "optimizer step"};
            course.sync->step(1e-4);
        }
        if (++course.steps == 2) course.second_loss = loss;
        const auto& last = course.sync->statistics().last;
        course.exposed.push_back(last.exposed_seconds);
        course.communication.push_back(last.communication_seconds);
    }

    Model model_;
    std::vector<std::uint8_t> text_;
    trainer::Samples samples_;
    trainer::Batch batch_;
    std::vector<Course> courses_;
};

}  // namespace

std::unique_ptr<Trainee> make_trainee(const trainer::Options& options, int rank) {
    trainer::CpuOps::initialise();
    if (options.model == "mlp") return std::make_unique<TraineeOf<trainer::Mlp<trainer::CpuOps>>>(options, rank);
    return std::make_unique<TraineeOf<trainer::Transformer<trainer::CpuOps>>>(options, rank);
}

void check_equal_losses(const std::vector<std::string>& names, const std::vector<Observed>& observed) {
    const Observed* first = nullptr;
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (!strategy(names[i]).synchronises()) continue;
        if (first == nullptr) first = &observed[i];
        if (observed[i].second_loss != first->second_loss)
            throw std::runtime_error(names[i] + ": it trains another model than the strategies before it");
    }
}

}  // namespace bench
