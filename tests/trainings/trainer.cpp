// SPDX-License-Identifier: BSL-1.0
#include "trainer.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <optional>
#include <utility>

namespace gradsync_test {

namespace {

/// One rank of a training: a trainer that uses the API as the guides say. All that reads or writes numbers is a kernel, which on devices
/// runs later.
class Trainer {
public:
    Trainer(Face& sync, const DrawnTraining& t, const Leg& leg, std::vector<Tensor>& model, int rank, Kernels& kernels,
            const MakeOptimizer& make_optimizer)
        : sync_(sync),
          has_(sync.abilities),
          t_(t),
          leg_(leg),
          model_(model),
          rank_(rank),
          kernels_(kernels),
          optimizer_((sync.broadcast_parameters(t.root), kernels.finish(), make_optimizer(model))) {}
    Trainer& operator=(Trainer&&) = delete;
    ~Trainer() { kernels_.finish(); }

    Trained train() {
        if (!has_.is_reducer && !leg_.from.empty()) sync_.load(leg_.from);
        for (int s = leg_.first; s < leg_.last; ++s) {
            if (has_.averages_later) finish_last(s - 1);
            thaw(s);
            step(s);
            forget_renewed();
        }
        if (has_.averages_later) finish_last(leg_.last - 1);
        if (!has_.is_reducer && !leg_.to.empty()) sync_.save(leg_.to);
        return {weights(), norms_};
    }

private:
    using BufferView = gradsync::BufferView;

    /// Frees what gradients were before their last mark.
    void forget_renewed() {
        if (t_.renews) kernels_.finish();
        for (auto& memories : renewed_)
            if (memories.size() > 1) memories.erase(memories.begin(), memories.end() - 1);
    }

    std::vector<Bytes> weights() {
        std::vector<Bytes> result(model_.size());
        const auto read = [&](std::size_t i) { kernels_.run([&to = result[i], from = value(i)] { to = bytes_of(from); }); };
        if (!has_.is_reducer) sync_.flush();
        for (std::size_t i = 0; i < model_.size(); ++i)
            if (has_.gathers) {
                const auto use = sync_.gather(t_.unit_of(i));
                read(i);
            } else {
                read(i);
            }
        kernels_.finish();
        return result;
    }

    void thaw(int s) {
        if (!has_.unfreezes) return;
        std::vector<std::size_t> which;
        for (std::size_t i = 0; i < model_.size(); ++i)
            if (s > 0 && t_.parameters[i].thaws == s) which.push_back(i);
        if (!which.empty()) sync_.unfreeze(which), rebuilt_ = false;
    }

    void step(int s) {
        written_.assign(model_.size(), 0);
        kernels_.disturb(s, 0, false);
        if (has_.records && t_.rebuilds && t_.draw(2, 20, s) == 0) sync_.record_next_step();
        if (t_.interrupts && !t_.pooled() && !t_.counted() && t_.draw(2, 21, s) == 0) {  // a micro-batch that goes wrong
            {
                const auto guard = sync_.no_sync();
                pass(s, 50);
            }
            sync_.discard();
            written_.assign(model_.size(), 0);
        }
        if (t_.finds_unused() && !t_.pooled())
            for (std::size_t i = 0; i < model_.size(); ++i)
                if (t_.is_trained(s, i)) fill(gradient(i), 0);
        const int rounds = t_.pooled() ? t_.turns(0) : 1;
        for (int round = 0; round < rounds; ++round) this->round(s, round);
        kernels_.disturb(s, 1, false);
        end_step(s);
        if (t_.rebuilds && t_.draw(2, 22, s) == 0 && !has_.averages_later) rebuild();
        if (has_.publishes && t_.interrupts && t_.draw(4, 23, s) == 0) sync_.publish();
    }

    /// The micro-batches up to a finish(), and that.
    void round(int s, int round) {
        const bool has_batch = t_.has_batch(s, round, rank_);
        const bool ends_unevenly = t_.counted() && t_.pooled() && t_.turns(0) != t_.turns(t_.ranks - 1) && round + 1 == t_.turns(0);
        if (t_.joins || ends_unevenly) sync_.begin_step(has_batch);
        if (t_.weighted() && has_batch) sync_.set_weight(t_.weight(s, round, rank_));
        // In stage 3 a rank with fewer micro-batches takes part in the gathers of the others.
        for (int turn = t_.turns(rank_); has_.gathers && !t_.pooled() && turn < t_.turns(0); ++turn) pass(s, turn, false);
        const int first = t_.pooled() ? round : 0, last = t_.pooled() ? round + 1 : t_.turns(rank_);
        for (int turn = first; turn < last; ++turn) {
            std::optional<gradsync::NoSync> guard;
            if (turn + 1 < last) guard.emplace(sync_.no_sync());
            if (turn + 1 == last && !t_.pooled() && t_.rebuilds && t_.draw(4, 24, s) == 0) rebuild();
            pass(s, turn, has_batch || t_.eager);
        }
        kernels_.disturb(s, 2 + round, true);
        if (!has_.is_reducer) sync_.flush();
        if (has_.polls && !has_.averages_later && t_.polls)
            while (!sync_.try_finish()) ::sched_yield();
        else sync_.finish();
    }

    void rebuild() {
        if (has_.rebuilds) sync_.rebuild_buckets(), rebuilt_ = true;
    }

    /// A forward, and a backward that marks gradients or not.
    void pass(int s, int turn, bool marks = true) {
        std::vector<std::size_t> all;
        for (std::size_t i = 0; i < model_.size(); ++i)
            if (t_.is_trained(s, i)) all.push_back(i);
        if (has_.gathers) {
            const auto units = shuffled(sync_.unit_count(), static_cast<std::uint32_t>(t_.draw(1u << 30, 25, t_.order == 0 ? 0 : s)));
            for (const std::size_t u : units) const auto use = sync_.gather(u);
            const bool by_parameter = t_.device && t_.pooled();  // in reverse order of registration
            for (auto i = all.rbegin(); by_parameter && i != all.rend(); ++i) {
                const auto use = sync_.gather(t_.unit_of(*i));
                if (marks) backward(s, turn, t_.mark_order(s, turn, rank_, {*i}));
            }
            for (auto u = units.rbegin(); !by_parameter && u != units.rend(); ++u) {
                const auto use = sync_.gather(*u);
                std::vector<std::size_t> own;
                for (const std::size_t i : all)
                    if (t_.unit_of(i) == *u) own.push_back(i);
                if (marks) backward(s, turn, t_.mark_order(s, turn, rank_, own));
            }
        } else if (t_.device && t_.pooled() && rebuilt_) {  // they want the order of the plan
            std::vector<std::size_t> planned;
            for (std::size_t b = 0; b < sync_.plan().size(); ++b)
                for (const std::size_t i : sync_.plan().bucket(b))
                    if (t_.uses(s, turn, rank_, i)) planned.insert(planned.end(), t_.marks(s, turn, rank_, i), i);
            if (marks) backward(s, turn, planned);
        } else if (marks) {
            backward(s, turn, t_.mark_order(s, turn, rank_, all));
        }
    }
    void backward(int s, int turn, const std::vector<std::size_t>& order) {
        std::vector<std::size_t> mine, others;
        for (const std::size_t i : order) (t_.threads && i % 2 == 1 ? others : mine).push_back(i);
        std::future<void> other;
        if (!others.empty()) other = std::async(std::launch::async, [&] { mark(s, turn, others); });
        mark(s, turn, mine);
        if (!others.empty()) other.get();
    }
    void mark(int s, int turn, const std::vector<std::size_t>& order) {
        for (std::size_t k = 0; k < order.size(); ++k) {
            const std::size_t i = order[k];
            kernels_.disturb(s, 100 * (turn + 1) + static_cast<int>(k), true);
            if (has_.waits) sync_.wait_parameter(i);
            const bool adds = written_[i] && !t_.pooled() && t_.options.accumulation == gradsync::Accumulation::in_gradients;
            const bool is_final = std::find(order.begin() + static_cast<std::ptrdiff_t>(k) + 1, order.end(), i) == order.end();
            BufferView to = gradient(i);
            if (t_.renews && is_final) {
                renewed_[i].emplace_back((to.count + 1) * size_of(to.dtype));
                to.data = renewed_[i].back().data();
                kernels_.use(to);
            }
            if (is_final && t_.poisoned(s)) fill(to, std::nan(""));
            else if (is_final)
                kernels_.run(
                    [=, from = value(i), rank = rank_, batch = t_.batch(s, turn)] { write_gradient(to, from, rank, batch, i, adds); });
            else if (!adds) fill(to, 1000);  // what must not leave yet
            if (is_final) written_[i] = 1;
            if (has_.is_reducer && t_.renews && is_final) sync_.mark_ready(i, to);
            else sync_.mark_ready(i);
        }
    }
    void fill(BufferView to, double x) {
        kernels_.run([=] { write(to, constant_bytes(to.dtype, to.count, x)); });
    }
    BufferView gradient(std::size_t i) { return sync_.gradient(i); }
    gradsync::ConstBufferView value(std::size_t i) { return has_.is_reducer ? model_[i].value_view() : sync_.value(i); }

    void end_step(int s) {
        double scale = 1;
        if (t_.max_norm > 0) {
            if (has_.clips && t_.in_place) norms_.push_back(sync_.clip_gradients_by_norm(t_.max_norm));
            if (!has_.is_reducer || !t_.in_place) {
                norms_.push_back(sync_.gradient_norm());
                scale = gradsync::clip_factor(norms_.back(), t_.max_norm);
            }
        }
        if (has_.is_reducer) {
            if (!has_.averages_later && !t_.skips(s) && !sync_.was_skipped()) {
                kernels_.run([this] { optimizer_->begin_step(); });
                for (std::size_t i = 0; i < model_.size(); ++i) step_parameter(s, i, gradient(i), scale);
            }
        } else if (t_.skips(s)) {
            sync_.discard();
        } else {
            sync_.step(scale);
        }
    }
    void step_parameter(int s, std::size_t i, BufferView average, double scale = 1) {
        if (t_.is_trained(s, i) && sync_.was_used(i))
            kernels_.run([=, this] { optimizer_->step(i, average, scale, model_[i].value_view()); });
    }
    /// With OverlapForward: the averages of step s arrive.
    void finish_last(int s) {
        if (s < 0) return;
        if (!t_.skips(s)) kernels_.run([this] { optimizer_->begin_step(); });
        for (const std::size_t i : shuffled(model_.size(), static_cast<std::uint32_t>(t_.draw(1u << 30, 26, s, 0, rank_)))) {
            const BufferView average = sync_.acquire_average(i);
            if (!t_.skips(s)) step_parameter(s, i, average);
        }
        sync_.drop_averages();
    }

    Face& sync_;
    const Face::Abilities has_;
    const DrawnTraining& t_;
    const Leg& leg_;
    std::vector<Tensor>& model_;
    int rank_;
    Kernels& kernels_;
    const std::unique_ptr<TrainersOptimizer> optimizer_;  ///< beside a Reducer
    std::vector<char> written_;                           ///< by parameter: has a gradient of this step
    bool rebuilt_ = false;                                ///< the plan's order is no longer that of the registration
    std::vector<std::vector<Bytes>> renewed_ = std::vector<std::vector<Bytes>>(model_.size());
    std::vector<double> norms_;
};

}  // namespace

Trained train(Face& sync, const DrawnTraining& t, const Leg& leg, std::vector<Tensor>& model, int rank, Kernels& kernels,
              const MakeOptimizer& make_optimizer) {
    return Trainer(sync, t, leg, model, rank, kernels, make_optimizer).train();
}

}  // namespace gradsync_test
