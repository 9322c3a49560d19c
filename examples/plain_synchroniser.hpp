// SPDX-License-Identifier: BSL-1.0
#pragma once
// Plain data parallelism: every rank holds everything. What gradsync adds to a trainer stands in four places, marked
// (1) to (4).

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/compress/compressor.hpp>
#include <gradsync/gradsync.hpp>

#include "muon.hpp"
#include "options.hpp"
#include "synchroniser.hpp"

namespace gradsync_train {

template <class Ops, class Backend, class OverlapPolicy, class Exchange = gs::AllReduce>
class PlainSynchroniser final : public BackendSynchroniser<Backend> {
    using Reducer = gs::Reducer<Backend, gs::AnyBuckets, OverlapPolicy, Exchange>;
    using Base = BackendSynchroniser<Backend>;
    using Base::parameters_, Base::comm_, Base::units_;
    static constexpr bool gathers_in_forward = requires { OverlapPolicy::gathers_in_forward; };
    static constexpr bool compresses = gs::Compressor<Exchange, Backend>;

public:
    PlainSynchroniser(Backend comm, Parameters& parameters, Units units, const Options& o, gs::Observer* observer, gs::AnyBuckets buckets,
                      OverlapPolicy overlap, gs::plan::CallCost cost, Ops ops = {}, Exchange exchange = Exchange{})
        : Base{comm, parameters, std::move(units)},
          ops_{ops},
          micro_batches_{o.deal(comm.size()).count(comm.rank())},
          clip_{o.clip},
          elastic_{o.elastic},
          replans_{o.buckets == "optimal"},
          profile_{.fixed = cost.fixed, .per_byte = cost.per_byte},
          optimizer_{make_optimizer<OptimizerOf<Ops>>(parameters, o)},
          due_(parameters.size()),
          all_(parameters.size()) {
        std::iota(all_.begin(), all_.end(), std::size_t{0});
        const bool borrowed = o.gradients == "borrowed";
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const std::size_t n = parameters[i].count;
            if (i == weights_.size()) {
                weights_.push_back(ops_.floats(n));
                ops_.write(n, weights_[i].data(), [&](std::span<float> out) { parameters.initialise(i, 0, out); });
                for (auto& mean : means_.emplace_back()) mean = ops_.floats(n);
            }
            parameters.bind(i, weights_[i].data());
            if (borrowed) own_gradients_.push_back(ops_.floats(n));
            states_.push_back({means_[i][0].data(), means_[i][1].data()});
        }

        // (1) Tell the reducer what there is to synchronise, and start from rank 0's parameters.
        std::vector<gs::ParameterView> views;
        for (std::size_t i = 0; i < parameters.size(); ++i)
            views.push_back(
                view_of(parameters[i], weights_[i].data(), borrowed ? own_gradients_[i].data() : nullptr, Backend::memory_space));
        reducer_.emplace(comm, std::move(views),
                         gs::ReducerOptions{.gradients = borrowed ? gs::GradientStorage::borrowed : gs::GradientStorage::in_buckets,
                                            // Micro-batches are added up, over ranks and over time, and divided by their number.
                                            .accumulation = gs::Accumulation::in_buckets,
                                            .micro_batches = o.deal(comm.size()).micro_batches,
                                            .reduce_dtype = reduce_dtype(o),
                                            .observer = observer},
                         std::move(buckets), std::move(overlap), std::move(exchange));
        if (!elastic_) reducer_->broadcast_parameters();
    }

    // With OverlapForward averages arrive under the next forward pass: what waits for one is its parameter's step.
    void enter(std::size_t unit) override { settle(units_[unit]); }
    void leave(std::size_t) override {}

    float* gradient(std::size_t i) override { return static_cast<float*>(reducer_->gradient_view(i).data); }
    // (2) A gradient is announced the moment it is final; its bucket may leave while others are computed.
    void ready(std::size_t i) override { reducer_->mark_ready(i); }

    void begin_backward(std::size_t micro_batch) override {
        if (micro_batch == 0) replan();
        // (3) All micro-batches but the last are added up on this rank, and not communicated.
        last_ = micro_batch + 1 == micro_batches_;
        if (!last_) guard_.emplace(reducer_->no_sync());
    }
    void end_backward() override {
        guard_.reset();
        // (4) After this the gradients are the mean over all ranks.
        if (!last_) return;
        if constexpr (gathers_in_forward) averages_ = reducer_->finish();
        else reducer_->finish();
    }

    void step(double learning_rate) override {
        optimizer_.set_learning_rate(learning_rate);
        optimizer_.begin_step();
        if (clip_ > 0) clip();
        due_.assign(due_.size(), true);
        due_count_ = due_.size();
        if (!gathers_in_forward && !elastic_) flush();
    }
    void flush() override { settle(all_); }

    void collect(const Synchroniser::StateSink& sink) override {
        flush();
        // A device goes on computing with what a lost rank has left: it is known here, before anything is kept.
        if constexpr (Ops::on_device) comm_.barrier().wait();
        if (comm_.rank() == 0) for_whole_state(sink);
        if constexpr (compresses) collect_compression(sink);
    }
    void restore(std::uint64_t steps, const Synchroniser::StateSource& source) override {
        for_each_array(
            [&](StatePlace place, std::size_t n, float* data) { ops_.write(n, data, [&](std::span<float> out) { source(place, out); }); });
        optimizer_.set_steps(steps);
        if constexpr (compresses) {
            for (std::size_t i = 0; i < weights_.size(); ++i) {
                source({i, 3, 0}, floats(reducer_->exchange().shared(i)));
                source({i, 4 + static_cast<std::size_t>(comm_.rank()), 0}, floats(reducer_->exchange().residual(i)));
            }
            reducer_->exchange().set_steps(steps);
        }
    }
    StateViews state_views() override {
        StateViews state{.is_replicated = !compresses};
        for_each_array([&](StatePlace, std::size_t n, float* data) { state.views.push_back({data, n}); });
        if constexpr (compresses)
            for (std::size_t i = 0; i < weights_.size(); ++i)
                for (const gs::BufferView kept : {reducer_->exchange().shared(i), reducer_->exchange().residual(i)})
                    state.views.push_back(kept);
        return state;
    }
    void state_was_written(std::uint64_t steps) override {
        optimizer_.set_steps(steps);
        if constexpr (compresses) reducer_->exchange().set_steps(steps);
    }
    /// A device may have taken steps that the host does not know to have failed; what a lost rank had not sent is lost with it.
    bool has_whole_state() const override { return !Ops::on_device && !compresses && due_count_ == 0; }
    void for_whole_state(const Synchroniser::StateSink& sink) const override {
        std::vector<float> own;
        for_each_array([&](StatePlace place, std::size_t n, const float* data) { sink(place, ops_.read(n, data, own)); });
    }

    const gs::Statistics& statistics() const override { return reducer_->statistics(); }
    double matrix_seconds() const override { return matrix_seconds_of(optimizer_); }
    MemoryUse memory() const override {
        const std::uint64_t weights = parameters_.count() * sizeof(float);
        return {.parameters = weights,
                .gradients = reducer_->bytes() + (own_gradients_.empty() ? 0 : weights) + (compresses ? weights : 0),
                .optimizer = 2 * weights};
    }

    BucketProfile profile() const override {
        BucketProfile profile = profile_;
        for (std::size_t i = 0; i < reducer_->statistics().ready_seconds.size(); ++i) {
            profile.ready.push_back(reducer_->statistics().ready_seconds[i]);
            profile.bytes.push_back(parameters_[i].count * sizeof(float));
        }
        return profile;
    }

private:
    /// Optimal buckets are those of the second to fourth step: by then memory and caches are warm.
    void replan() {
        if (!replans_ || steps_ > 4) return;
        if (steps_ == 1) reducer_->record_order(3);
        if (steps_ == 4) (void)reducer_->rebuild_buckets();
        ++steps_;
    }

    static std::span<float> floats(gs::BufferView view) { return {static_cast<float*>(view.data), view.count}; }

    /// What each rank has not sent yet is its own.
    void collect_compression(const Synchroniser::StateSink& sink) {
        const auto ranks = static_cast<std::size_t>(comm_.size());
        std::vector<float> all;
        for (std::size_t i = 0; i < weights_.size(); ++i) {
            const auto own = floats(reducer_->exchange().residual(i));
            all.resize(ranks * own.size());
            comm_.all_gather(gs::const_buffer(own), gs::buffer(all)).wait();
            if (comm_.rank() != 0) continue;
            sink({i, 3, 0}, floats(reducer_->exchange().shared(i)));
            for (std::size_t r = 0; r < ranks; ++r) sink({i, 4 + r, 0}, std::span{all}.subspan(r * own.size(), own.size()));
        }
    }

    void clip() {
        if constexpr (Ops::on_device && !gathers_in_forward) {
            // Every rank has all averages: the device reads them once more, and no host waits for their norm.
            std::vector<gs::ConstBufferView> all;
            for (std::size_t i = 0; i < due_.size(); ++i) all.push_back(reducer_->gradient_view(i));
            optimizer_.scale_gradients_by(ops_.clip_factor(all, clip_));
        } else {
            scale_ = gradsync::clip_factor(reducer_->gradient_norm(), clip_);
        }
    }

    /// use(place, count, data) for weights and means.
    template <class Use>
    void for_each_array(Use&& use) const {
        for (std::size_t i = 0; i < weights_.size(); ++i) {
            const std::size_t n = parameters_[i].count;
            use(StatePlace{i, 0, 0}, n, const_cast<float*>(weights_[i].data()));
            for (std::size_t k = 0; k < 2; ++k) use(StatePlace{i, 1 + k, 0}, n, const_cast<float*>(means_[i][k].data()));
        }
    }

    /// Takes the steps of these parameters that are still to be done: on a device together.
    void settle(std::span<const std::size_t> which) {
        for (const std::size_t i : which) {
            if (!due_[i]) continue;
            if constexpr (gathers_in_forward) averages_.acquire(i);
            const gs::BufferView gradient = reducer_->gradient_view(i);
            if constexpr (Ops::on_device) {
                const gs::BufferView value{weights_[i].data(), parameters_[i].count, gs::DType::f32, Backend::memory_space};
                slices_.push_back({.parameter = i, .master = value, .gradient = gradient, .state = states_[i]});
            } else {
                const std::span value(weights_[i].data(), parameters_[i].count);
                const std::span<const float> averaged = gradient.template as<float>();
                if (optimizer_.is_matrix(i)) {
                    const std::span<const std::size_t> shape = parameters_[i].shape;
                    scratch_.resize(optimizer_.scratch_count(shape));
                    optimizer_.step(gs::OptimizerMatrix<float>{i, shape, value, averaged, scale_, states_[i], scratch_});
                } else {
                    optimizer_.step(gs::OptimizerSlice<float>{i, 0, value, averaged, scale_, states_[i]});
                }
            }
            due_[i] = false;
            --due_count_;
        }
        if constexpr (Ops::on_device) {
            if (!slices_.empty()) optimizer_.step(slices_, scale_, comm_.stream());
            slices_.clear();
        }
    }

    using Floats = typename Ops::Floats;

    struct Arrays {
        std::vector<Floats> weights;
        std::vector<std::array<Floats, 2>> means;  // the optimizer's
    };
    /// Those that have outlived another synchroniser, or none yet.
    static std::shared_ptr<Arrays> arrays_of(const Parameters& parameters) {
        std::shared_ptr<void>* const kept = parameters.kept_arrays();
        if (kept == nullptr) return std::make_shared<Arrays>();
        if (*kept == nullptr) *kept = std::make_shared<Arrays>();
        return std::static_pointer_cast<Arrays>(*kept);
    }

    Ops ops_;
    std::size_t micro_batches_;
    double clip_;
    bool elastic_;  // the loop flushes
    bool replans_;
    unsigned steps_ = 0;  // begun, until buckets are planned for good
    BucketProfile profile_;
    std::shared_ptr<Arrays> arrays_ = arrays_of(parameters_);
    std::vector<Floats>& weights_ = arrays_->weights;
    std::vector<std::array<Floats, 2>>& means_ = arrays_->means;
    std::vector<Floats> own_gradients_;
    std::vector<std::array<std::conditional_t<Ops::on_device, void, float>*, 2>> states_;  // where they are
    std::vector<gs::DeviceSlice> slices_;
    OptimizerOf<Ops> optimizer_;
    std::vector<float> scratch_;  // of the step of a matrix
    std::optional<Reducer> reducer_;
    std::conditional_t<gathers_in_forward, gs::PendingAverages<Backend>, std::monostate> averages_;
    std::optional<gradsync::NoSync> guard_;
    bool last_ = false;  // micro-batch of the step
    double scale_ = 1;
    std::vector<bool> due_;         // by parameter: averaged, but not stepped yet
    std::vector<std::size_t> all_;  // parameters
    std::size_t due_count_ = 0;
};

}  // namespace gradsync_train
