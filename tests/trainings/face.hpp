// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/checkpoint.hpp>

namespace gradsync_test {

/// A Reducer or a sharded face behind one type, so that the trainer is compiled once. Calls that a face does not have throw; the flags say
/// which it has.
class Face {
public:
    struct Abilities {
        bool is_reducer;      ///< it averages, and the trainer steps
        bool gathers;         ///< weights are there while their unit is gathered
        bool averages_later;  ///< finish() returns averages that are waited for one by one
        bool unfreezes, records, rebuilds, publishes, clips, polls, waits;
    };
    const Abilities abilities;

    virtual ~Face() = default;
    virtual void broadcast_parameters(int root) = 0;
    virtual void load(const std::filesystem::path& from) = 0;
    virtual void save(const std::filesystem::path& to) = 0;
    virtual void unfreeze(std::span<const std::size_t> which) = 0;

    virtual void begin_step(bool has_batch) = 0;
    virtual void set_weight(double weight) = 0;
    virtual gradsync::NoSync no_sync() = 0;
    virtual void record_next_step() = 0;
    virtual void wait_parameter(std::size_t i) = 0;
    virtual void mark_ready(std::size_t i) = 0;
    virtual void mark_ready(std::size_t i, gradsync::BufferView gradient) = 0;
    virtual bool try_finish() = 0;
    virtual void finish() = 0;  ///< keeps the averages that it returns
    virtual gradsync::BufferView acquire_average(std::size_t i) = 0;
    virtual void drop_averages() = 0;
    virtual void discard() = 0;
    virtual void flush() = 0;
    virtual void step(double scale) = 0;
    virtual double gradient_norm() = 0;
    virtual double clip_gradients_by_norm(double limit) = 0;
    virtual void rebuild_buckets() = 0;
    virtual void publish() = 0;

    virtual gradsync::BufferView gradient(std::size_t i) = 0;
    virtual gradsync::ConstBufferView value(std::size_t i) = 0;  ///< of a sharded face
    virtual bool was_used(std::size_t i) = 0;
    virtual bool was_skipped() = 0;  ///< the last step, as its gradients were not finite
    virtual const gradsync::BucketPlan& plan() = 0;
    virtual std::size_t unit_count() = 0;
    virtual std::shared_ptr<void> gather(std::size_t u) = 0;  ///< the weights of a unit are there while the result lives

protected:
    explicit Face(Abilities own) : abilities(own) {}
};

/// The face that is a Sync.
template <class Sync>
class FaceOf final : public Face {
    static constexpr bool is_reducer = !requires(Sync& s) { s.step(); };
    static constexpr bool averages_later = is_reducer && requires(Sync& s) { s.finish().acquire(0); };
    static constexpr bool gathers = requires(Sync& s) { s.gather(0); };
    static constexpr bool unfreezes = requires(Sync& s) { s.unfreeze({}); };
    static constexpr bool records = requires(Sync& s) { s.record_order(); };
    static constexpr bool rebuilds = requires(Sync& s) { s.rebuild_buckets(); };
    static constexpr bool publishes = requires(Sync& s) { s.publish(); };
    static constexpr bool clips = requires(Sync& s) { s.clip_gradients_by_norm(1.0); };
    static constexpr bool polls = requires(Sync& s) { s.try_finish(); };
    static constexpr bool waits = requires(Sync& s) { s.wait_parameter(0); };
    using BufferView = gradsync::BufferView;

public:
    template <class... Arguments>
    explicit FaceOf(Arguments&&... arguments)
        : Face({is_reducer, gathers, averages_later, unfreezes, records, rebuilds, publishes, clips, polls, waits}),
          sync_(std::forward<Arguments>(arguments)...) {}

    void broadcast_parameters(int root) override { sync_.broadcast_parameters(root); }
    void load(const std::filesystem::path& from) override {
        if constexpr (!is_reducer) sync_.optimizer().steps = std::stoi(gradsync::load_shards(from, sync_));
        else missing();
    }
    void save(const std::filesystem::path& to) override {
        if constexpr (is_reducer) missing();
        else if (sync_.replica() == 0) gradsync::save_shards(to, sync_, std::to_string(sync_.optimizer().steps));
    }
    void unfreeze([[maybe_unused]] std::span<const std::size_t> which) override {
        if constexpr (unfreezes) sync_.unfreeze(which);
        else missing();
    }

    void begin_step(bool has_batch) override { (void)sync_.begin_step(has_batch); }
    void set_weight(double weight) override { sync_.set_weight(weight); }
    gradsync::NoSync no_sync() override { return sync_.no_sync(); }
    void record_next_step() override {
        if constexpr (records) sync_.record_order(1);
        else missing();
    }
    void wait_parameter([[maybe_unused]] std::size_t i) override {
        if constexpr (waits) sync_.wait_parameter(i);
        else missing();
    }
    void mark_ready(std::size_t i) override { sync_.mark_ready(i); }
    void mark_ready([[maybe_unused]] std::size_t i, [[maybe_unused]] BufferView gradient) override {
        if constexpr (is_reducer) sync_.mark_ready(i, gradient);
        else missing();
    }
    bool try_finish() override {
        if constexpr (polls) return static_cast<bool>(sync_.try_finish());
        else missing();
    }
    void finish() override {
        if constexpr (averages_later) averages_ = sync_.finish();
        else sync_.finish();
    }
    BufferView acquire_average([[maybe_unused]] std::size_t i) override {
        if constexpr (averages_later) return averages_.acquire(i);
        else missing();
    }
    void drop_averages() override { averages_ = {}; }
    void discard() override { sync_.discard(); }
    void flush() override {
        if constexpr (!is_reducer) sync_.flush();
        else missing();
    }
    void step([[maybe_unused]] double scale) override {
        if constexpr (!is_reducer) sync_.step(scale);
        else missing();
    }
    double gradient_norm() override { return sync_.gradient_norm(); }
    double clip_gradients_by_norm([[maybe_unused]] double limit) override {
        if constexpr (clips) return sync_.clip_gradients_by_norm(limit);
        else missing();
    }
    void rebuild_buckets() override {
        if constexpr (rebuilds) (void)sync_.rebuild_buckets();
        else missing();
    }
    void publish() override {
        if constexpr (publishes) sync_.publish();
        else missing();
    }

    BufferView gradient(std::size_t i) override {
        if constexpr (is_reducer) return sync_.gradient_view(i);
        else return sync_.acquire_gradient(i);
    }
    gradsync::ConstBufferView value([[maybe_unused]] std::size_t i) override {
        if constexpr (!is_reducer) return sync_.parameter_value(i);
        else missing();
    }
    bool was_used([[maybe_unused]] std::size_t i) override {
        if constexpr (requires { sync_.was_used(i); }) return sync_.was_used(i);
        else missing();
    }
    bool was_skipped() override { return sync_.statistics().last.skipped != 0; }
    const gradsync::BucketPlan& plan() override {
        if constexpr (requires { sync_.plan(); }) return sync_.plan();
        else missing();
    }
    std::size_t unit_count() override {
        if constexpr (requires { sync_.unit_count(); }) return sync_.unit_count();
        else missing();
    }
    std::shared_ptr<void> gather([[maybe_unused]] std::size_t u) override {
        if constexpr (gathers) return std::shared_ptr<void>(new auto(sync_.gather(u)));
        else missing();
    }

private:
    [[noreturn]] static void missing() { throw std::logic_error("the trainer calls what this face does not have"); }

    struct Nothing {};
    static auto averages_type() {
        if constexpr (averages_later) return std::type_identity<decltype(std::declval<Sync&>().finish())>();
        else return std::type_identity<Nothing>();
    }

    Sync sync_;
    typename decltype(averages_type())::type averages_;
};

}  // namespace gradsync_test
