#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.hpp"
#include "bucket/size_capped.hpp"
#include "core/backend.hpp"
#include "core/bucket_plan.hpp"
#include "core/error.hpp"
#include "core/overlap_policy.hpp"
#include "core/parameter.hpp"
#include "kernel/convert.hpp"
#include "kernel/elementwise.hpp"
#include "observe/statistics.hpp"
#include "overlap/overlap_backward.hpp"
#include "reducer/bucket_storage.hpp"
#include "reducer/flight.hpp"
#include "reducer/gradient_norm.hpp"
#include "reducer/options.hpp"
#include "reducer/readiness.hpp"
#include "reducer/verification.hpp"

namespace gradsync::inline v0 {

/// Keeps the gradients of data-parallel ranks in step: mark each gradient when it is ready, then `finish()`, and
/// every rank holds the mean. The engine plans buckets once, starts their collectives in the plan's order, and
/// checks that nothing half-reduced ever reaches an optimizer.
///
///     gs::Reducer<gs::ThreadBackend, gs::SizeCappedBuckets, gs::OverlapBackward> sync(comm, model.parameters());
///     sync.broadcast_parameters();
///     for (...) {
///         model.backward(batch, [&](std::size_t i) { sync.mark_ready(i); });
///         sync.finish();
///         model.step();
///     }
///
/// Collective: construction, `broadcast_*`, `begin_step`, `finish`, `gradient_norm`, `clip_*`, `rebuild_buckets`: all
/// ranks call them in the same order. Threads: `mark_ready` from any thread; everything else from one thread at a
/// time, when no marks are under way. After an exception the object is of no more use, and so is its communicator;
/// every call says so. The trainer's parameters and gradients outlive the object; it neither moves nor copies.
template <class B, class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward>
class Reducer {
    static_assert(Backend<B>,
                  "gradsync: the first argument of Reducer is a backend (ThreadBackend, ...): write "
                  "Reducer<Backend, BucketPolicy, OverlapPolicy>");
    static_assert(BucketPolicy<Buckets>,
                  "gradsync: the second argument of Reducer is a bucket policy (SizeCappedBuckets, Flat, PerParameter, "
                  "...): write Reducer<Backend, BucketPolicy, OverlapPolicy>");
    static_assert(OverlapPolicy<Overlap>,
                  "gradsync: the third argument of Reducer is an overlap policy (OverlapBackward, NoOverlap, ...): write "
                  "Reducer<Backend, BucketPolicy, OverlapPolicy>");

    using Clock = std::chrono::steady_clock;

public:
    /// `parameters`: a range of anything that is a `Parameter`, in the order in which the forward uses them; their
    /// gradients are expected to become ready in the reverse of it. Collective. Throws Error(parameter_mismatch),
    /// the same text on every rank, where parameters, policies or options differ.
    template <class Range>
    Reducer(B backend, Range&& parameters, ReducerOptions options = {}, Buckets buckets = {}, Overlap overlap = {})
        : backend_(std::move(backend)),
          options_(options),
          bucket_policy_(std::move(buckets)),
          parameters_(view_all(parameters)),
          infos_(check_and_describe()),
          order_(default_order()),
          plan_(make_plan(order_)),
          storage_(make_storage()),
          readiness_(uses(), plan_),
          flight_(plan_.size()),
          norm_(trainable_counts()),
          deposited_(parameters_.size()),
          overlap_(std::move(overlap)) {
        detail::verify<B>(backend_, parameters_, plan_,
                          bucket_policy_.describe() + " " + overlap_.describe() + " " + describe(options_));
        statistics_.buckets.resize(plan_.size());
        overlap_.attach(background_);
    }
    Reducer(const Reducer&) = delete;
    Reducer& operator=(const Reducer&) = delete;
    /// Collectives that are still in flight are dropped, and the communicator fails on every rank.
    ~Reducer() { overlap_.detach(); }

    // ------------------------------------------------------------------------------------------ before the first step

    /// Gives every rank the root's weights, of frozen parameters too. Collective.
    void broadcast_parameters(int root = 0) {
        std::vector<BufferView> values;
        for (const ParameterView& p : parameters_) {
            if (p.value.data == nullptr && p.gradient.count != 0)
                throw_here(Errc::invalid_argument, "broadcast_parameters",
                           "parameter '" + p.name + "' has no value; give one in its ParameterView or parameter_traits", p.name);
            values.push_back(p.value);
        }
        broadcast_buffers(values, root);
    }

    /// Gives every rank the root's contents of these buffers: state that has no gradient. Collective.
    void broadcast_buffers(std::span<const BufferView> buffers, int root = 0) {
        check_usable("broadcast_buffers");
        std::vector<typename B::WorkType> works;
        works.reserve(buffers.size());
        for (const BufferView& b : buffers) works.push_back(backend_.broadcast(b, root));
        for (auto& work : works) work.wait();
    }

    // -------------------------------------------------------------------------------------------------------- a step

    /// For uneven inputs: says whether this rank has a batch for the next step, and returns whether any rank has.
    /// A rank without a batch skips its backward and calls `finish()` all the same: it contributes nothing, but gets
    /// the gradients, so that its weights stay in step. Collective.
    ///
    ///     while (sync.begin_step(batch.has_value())) { if (batch) backward(...); sync.finish(); step(); }
    bool begin_step(bool has_batch = true) {
        check_usable("begin_step");
        check_between_steps("begin_step");
        std::int32_t live = has_batch ? 1 : 0;
        guarded([&] { backend_.all_reduce(buffer(std::span(&live, 1)), ReduceOp::sum).wait(); });
        has_batch_ = has_batch || live == 0;  // with no batch anywhere there is no such step
        return live > 0;
    }

    /// This rank's weight in `Averaging::weighted_mean` and `mean_over_count`: samples, tokens or micro-batches.
    /// Holds from the step that comes until it is set again; not while buckets are in flight.
    void set_weight(double weight) {
        check_usable("set_weight");
        if (options_.averaging != Averaging::weighted_mean && options_.averaging != Averaging::mean_over_count)
            throw_here(Errc::invalid_argument, "set_weight", "weights go with Averaging::weighted_mean or mean_over_count; choose one in ReducerOptions");
        if (!(weight >= 0) || !std::isfinite(weight))
            throw_here(Errc::invalid_argument, "set_weight", "a weight must be a finite number of 0 or more, not " + std::to_string(weight));
        if (flight_.started() != 0)
            throw_here(Errc::invalid_argument, "set_weight", "buckets of this step are in flight already; set the weight before the first mark_ready()");
        weight_ = weight;
    }

    /// While the guard lives, marks synchronise nothing: gradients of micro-batches add up (see Accumulation). Guards
    /// nest; an exception that passes through leaves nothing switched on.
    class [[nodiscard]] NoSync {
    public:
        explicit NoSync(std::atomic<int>& depth) noexcept : depth_(depth) { ++depth_; }
        NoSync(const NoSync&) = delete;
        NoSync& operator=(const NoSync&) = delete;
        ~NoSync() { --depth_; }

    private:
        std::atomic<int>& depth_;
    };

    NoSync no_sync() {
        check_usable("no_sync");
        if (flight_.started() != 0)
            throw_here(Errc::invalid_argument, "no_sync", "buckets of this step are in flight already; call finish() first");
        return NoSync(no_sync_depth_);
    }

    /// Gradient i is final for this backward (at its `uses`-th mark). From any thread. May copy the gradient into its
    /// bucket, start collectives and advance them, as the policies say.
    void mark_ready(std::size_t i) {
        check_index(i, "mark_ready");
        check_usable("mark_ready");
        switch (readiness_.mark(i)) {
            case detail::Readiness::Mark::more_to_come: return;
            case detail::Readiness::Mark::too_often: refuse_mark(i);
            case detail::Readiness::Mark::ready: break;
        }
        readiness_.used()[i] = 1;
        if (no_sync_depth_.load(std::memory_order_relaxed) != 0) {
            if (options_.accumulation == Accumulation::in_buckets) deposit(i);
            return readiness_.rearm(i);
        }
        if (deposits(i)) {
            const auto begin = Clock::now();
            deposit(i);
            add_exposed(Clock::now() - begin);
        }
        if (recording_) readiness_.record(i);
        guarded([&] {
            if (readiness_.fill(i)) overlap_.bucket_full(hook_);
            overlap_.gradient_ready(hook_);
        });
    }

    /// Returns when every gradient holds the average over the ranks, or throws: Errc::gradient_not_ready, naming the
    /// parameters, if some were not marked; whatever the backend throws. Collective.
    void finish() {
        check_usable("finish");
        const auto begin = Clock::now();
        guarded([&] {
            close_step();
            std::lock_guard polling(polling_);
            complete_step(begin);
        });
    }

    /// As `finish()`, but never blocks: false while gradients are not marked or collectives not complete; true when
    /// it has done all that `finish()` does. To be called again until then. Collective, as a whole. With
    /// UnusedParameters::agree the first call ends the backward: what is not marked by then counts as unused.
    bool try_finish() {
        check_usable("try_finish");
        if (has_batch_ && options_.unused == UnusedParameters::error && !all_ready()) return false;
        const auto begin = Clock::now();
        bool complete = false;
        guarded([&] {
            close_step();
            std::lock_guard polling(polling_);
            flight_.poll();
            complete = !flight_.in_flight() && used_map_work_.test();
            if (complete) complete_step(begin);
            else add_exposed(Clock::now() - begin);
        });
        return complete;
    }

    // ----------------------------------------------------------------------------------------------- after `finish()`

    /// Where gradient i lives. With GradientStorage::in_buckets, memory of the Reducer's, zero at first, valid until
    /// `rebuild_buckets` returns true.
    BufferView gradient_view(std::size_t i) const {
        check_index(i, "gradient_view");
        const ParameterView& p = parameters_[i];
        return options_.gradients == GradientStorage::in_buckets && p.requires_grad ? storage_.parameter(i) : p.gradient;
    }

    /// The same with its type; T must be the gradient's.
    template <Element T>
    std::span<T> gradient(std::size_t i) const {
        const BufferView view = gradient_view(i);
        if (view.dtype != dtype_of<T>)
            throw Error(Errc::invalid_argument, "gradient '" + parameters_[i].name + "' holds " + std::string(name_of(view.dtype)) +
                                                    ", not " + std::string(name_of(dtype_of<T>)),
                        {.operation = "gradient", .rank = backend_.rank(), .parameter = parameters_[i].name});
        return {static_cast<T*>(view.data), view.count};
    }

    /// The L2 norm of all gradients together, in double: the same bits on every rank and for every policy. Each rank
    /// reads only its share. Collective, after `finish()`.
    double gradient_norm() {
        check_usable("gradient_norm");
        return guarded([&] { return norm_.compute(backend_, [&](std::size_t i) { return gradient_view(i); }); });
    }

    /// What to multiply gradients by so that their norm is at most `max_norm`: for optimizers that take a factor and
    /// save the pass. 1 where nothing is to be done; not finite where the norm is not.
    static double clip_factor(double norm, double max_norm) noexcept {
        if (norm <= max_norm) return 1;
        return std::isfinite(norm) ? max_norm / norm : std::numeric_limits<double>::quiet_NaN();
    }

    /// Scales all gradients down to a global norm of at most `max_norm`; returns the norm before. Collective.
    double clip_gradients_by_norm(double max_norm) {
        check_limit(max_norm, "clip_gradients_by_norm");
        const double norm = gradient_norm();
        if (const double factor = clip_factor(norm, max_norm); factor != 1)
            for_gradients([&](BufferView gradient) { kernel::scale(gradient, factor); });
        return norm;
    }

    /// Clamps every element to [-limit, limit]. Local.
    void clip_gradients_by_value(double limit) {
        check_usable("clip_gradients_by_value");
        check_limit(limit, "clip_gradients_by_value");
        for_gradients([&](BufferView gradient) { kernel::clamp(gradient, limit); });
    }

    // --------------------------------------------------------------------------------------------------- bookkeeping

    /// Plans the buckets anew from the order in which gradients became ready in rank 0's first step (or in the step
    /// after `record_order()`). Values are kept, accumulated ones too. True if the plan changed: then views from
    /// `gradient_view` are to be asked for again. Between steps. Collective.
    bool rebuild_buckets() {
        check_usable("rebuild_buckets");
        check_between_steps("rebuild_buckets");
        std::vector<std::uint64_t> agreed(order_.begin(), order_.end());
        if (backend_.rank() == 0) {
            // Those that were not marked keep their place behind the others.
            std::vector<bool> seen(parameters_.size());
            std::size_t n = 0;
            for (std::size_t i : readiness_.recorded()) {
                agreed[n++] = i;
                seen[i] = true;
            }
            for (std::size_t i : order_)
                if (!seen[i]) agreed[n++] = i;
        }
        guarded([&] { backend_.broadcast(buffer(agreed), 0).wait(); });
        order_.assign(agreed.begin(), agreed.end());
        BucketPlan plan = make_plan(order_);
        if (plan == plan_) return false;

        std::swap(plan, plan_);
        detail::BucketStorage<B> storage = make_storage();
        for (std::size_t i : order_)
            // Borrowed gradients live with the trainer: a bucket holds nothing of theirs but sums of micro-batches.
            if (options_.gradients == GradientStorage::in_buckets || deposited_[i]) copy(storage_.parameter(i), storage.parameter(i));
        storage_ = std::move(storage);
        readiness_.set_plan(plan_);
        flight_.resize(plan_.size());
        statistics_.buckets.assign(plan_.size(), {});
        return true;
    }

    /// Records the order in which gradients become ready in the next step, for `rebuild_buckets`.
    void record_order() noexcept {
        readiness_.forget_order();
        recording_ = true;
    }

    /// Gradient i of borrowed ones lives elsewhere from now on: same count, same type. Between steps.
    void rebind_gradient(std::size_t i, BufferView gradient) {
        check_index(i, "rebind_gradient");
        BufferView& own = parameters_[i].gradient;
        if (options_.gradients != GradientStorage::borrowed || gradient.count != own.count || gradient.dtype != own.dtype ||
            gradient.space != own.space || gradient.data == nullptr)
            throw_here(Errc::invalid_argument, "rebind_gradient", "the new memory of '" + parameters_[i].name +
                                                  "' must be a borrowed gradient of the same count, type and space", parameters_[i].name);
        if (parameters_[i].requires_grad && is_direct(readiness_.bucket_of(i))) storage_.rebind(readiness_.bucket_of(i), i, gradient);
        own = gradient;
    }

    const Statistics& statistics() const noexcept { return statistics_; }
    const BucketPlan& plan() const noexcept { return plan_; }
    const B& backend() const noexcept { return backend_; }
    std::size_t size() const noexcept { return parameters_.size(); }  ///< parameters, frozen ones too
    const ParameterView& parameter(std::size_t i) const { return parameters_.at(i); }

private:
    /// The engine as the overlap policy sees it. What happens in hooks counts as exposed, what a thread of the
    /// policy's does in the background does not.
    template <bool in_hook>
    struct Engine {
        Reducer& reducer;
        void launch_full_buckets() { reducer.launch_full_buckets(in_hook); }
        bool in_flight() const noexcept { return reducer.flight_.in_flight(); }
        void poll() { reducer.poll(in_hook); }
    };

    // ---------------------------------------------------------------------------------------------------- set-up

    template <class Range>
    static std::vector<ParameterView> view_all(Range&& parameters) {
        using T = std::remove_cv_t<detail::range_element_t<std::remove_reference_t<Range>>>;
        static_assert(Parameter<T>,
                      "gradsync: specialise gradsync::parameter_traits for this type, with a static function gradient(T&) "
                      "that returns a contiguous range or a BufferView; see docs/your-own-tensor.md");
        std::vector<ParameterView> views;
        if constexpr (Parameter<T>) {
            using Traits = parameter_traits<std::remove_pointer_t<T>>;
            if constexpr (requires { Traits::space; })
                static_assert(Traits::space == B::memory_space,
                              "gradsync: choose a backend for the memory that these tensors lie in, or stage them through "
                              "the host: parameter_traits<T>::space is not the backend's memory_space");
            for (auto&& p : parameters) {
                views.push_back(parameter_view(p));
                if (views.back().name.empty()) views.back().name = std::to_string(views.size() - 1);
            }
        }
        return views;
    }

    std::vector<ParameterInfo> check_and_describe() {
        const auto refuse = [&](const ParameterView& p, const std::string& what) {
            throw_here(Errc::invalid_argument, "Reducer", "parameter '" + p.name + "' " + what, p.name);
        };
        const bool borrowed = options_.gradients == GradientStorage::borrowed;
        if (!borrowed && (options_.accumulation == Accumulation::in_buckets || options_.reduce_dtype))
            throw_here(Errc::invalid_argument, "Reducer",
                       "Accumulation::in_buckets and reduce_dtype are for borrowed gradients; gradients that live in the buckets are added up there by the trainer");
        if (options_.reduce_dtype && !is_floating(*options_.reduce_dtype))
            throw_here(Errc::invalid_argument, "Reducer", "reduce_dtype must be a floating type, not " + std::string(name_of(*options_.reduce_dtype)));
        std::vector<ParameterInfo> infos;
        infos.reserve(parameters_.size());
        for (const ParameterView& p : parameters_) {
            const BufferView& g = p.gradient;
            std::size_t volume = 1;
            for (std::size_t extent : p.shape) volume *= extent;
            if (!p.shape.empty() && volume != g.count) refuse(p, "has a shape of " + std::to_string(volume) + " elements, but a gradient of " + std::to_string(g.count));
            if (p.value.data && p.value.count != g.count) refuse(p, "has " + std::to_string(p.value.count) + " values, but a gradient of " + std::to_string(g.count));
            if (p.uses == 0) refuse(p, "has 0 uses; freeze it with requires_grad = false");
            infos.push_back({g.count, g.dtype, B::memory_space});
            if (!p.requires_grad) continue;
            if (borrowed && g.data == nullptr && g.count != 0)
                refuse(p, "has no gradient memory; allocate it, or let gradients live in the buckets (GradientStorage::in_buckets)");
            if (g.space != B::memory_space)
                refuse(p, "lies in " + std::string(name_of(g.space)) + " memory, but the backend works on " + std::string(name_of(B::memory_space)) + " memory");
            if (!is_floating(g.dtype)) {
                if (options_.averaging != Averaging::sum) refuse(p, "has a gradient of " + std::string(name_of(g.dtype)) + ", which can be summed only (Averaging::sum)");
                if (options_.accumulation == Accumulation::in_buckets) refuse(p, "has a gradient of " + std::string(name_of(g.dtype)) + ", which buckets do not add up (Accumulation::in_gradients)");
            } else if (options_.reduce_dtype) {
                infos.back().dtype = *options_.reduce_dtype;
            } else if (options_.accumulation == Accumulation::in_buckets) {
                infos.back().dtype = accumulator_of(g.dtype);
            }
        }
        return infos;
    }

    /// The reverse of the registration, without frozen parameters.
    std::vector<std::size_t> default_order() const {
        std::vector<std::size_t> order;
        order.reserve(parameters_.size());
        for (std::size_t i = parameters_.size(); i-- > 0;)
            if (parameters_[i].requires_grad) order.push_back(i);
        return order;
    }

    BucketPlan make_plan(std::span<const std::size_t> order) const {
        // One rank has nothing to send: with a bucket each, borrowed gradients are not even copied.
        if (backend_.size() == 1 && options_.gradients == GradientStorage::borrowed) {
            BucketPlan plan;
            for (const std::size_t& i : order) plan.push_back({&i, 1});
            return plan;
        }
        BucketPlan plan = bucket_policy_.plan(infos_, order);
        detail::check_plan(plan, infos_, parameters_, bucket_policy_.describe(), backend_.rank());
        return plan;
    }

    /// Is bucket b the gradient of its only parameter, in the trainer's own memory?
    bool is_direct(std::size_t b) const {
        const std::size_t i = plan_.bucket(b).front();
        return plan_.bucket(b).size() == 1 && options_.gradients == GradientStorage::borrowed &&
               options_.unused == UnusedParameters::error && options_.accumulation == Accumulation::in_gradients &&
               infos_[i].dtype == parameters_[i].gradient.dtype;
    }

    detail::BucketStorage<B> make_storage() {
        std::vector<BufferView> gradients;
        for (const ParameterView& p : parameters_) gradients.push_back(p.gradient);
        std::vector<bool> own_memory;
        for (std::size_t b = 0; b < plan_.size(); ++b) own_memory.push_back(!is_direct(b));
        return {backend_, plan_, infos_, gradients, own_memory};
    }

    std::vector<std::uint32_t> uses() const {
        std::vector<std::uint32_t> uses;
        for (const ParameterView& p : parameters_) uses.push_back(p.requires_grad ? p.uses : 0);
        return uses;
    }

    std::vector<std::size_t> trainable_counts() const {
        std::vector<std::size_t> counts;
        for (const ParameterView& p : parameters_) counts.push_back(p.requires_grad && is_floating(p.gradient.dtype) ? p.gradient.count : 0);
        return counts;
    }

    // ---------------------------------------------------------------------------------------------------- a step

    /// Does gradient i have to be copied into its bucket?
    bool deposits(std::size_t i) const noexcept {
        return options_.gradients == GradientStorage::borrowed && storage_.parameter(i).data != parameters_[i].gradient.data;
    }

    /// Copies gradient i into its bucket, or adds it to what micro-batches left there.
    void deposit(std::size_t i) {
        const BufferView from = parameters_[i].gradient, to = storage_.parameter(i);
        if (deposited_[i]) kernel::add(to, from);
        else copy(from, to);
        deposited_[i] = options_.accumulation == Accumulation::in_buckets;
    }

    static void copy(ConstBufferView from, BufferView to) {
        if (from.dtype != to.dtype) kernel::convert(from.data, from.dtype, to.data, to.dtype, to.count);
        else if (from.bytes() != 0) std::memcpy(to.data, from.data, from.bytes());
    }

    /// What this rank brings to this step's means.
    Contribution contribution() const noexcept {
        const double w = weight_;
        switch (options_.averaging) {
            case Averaging::mean: return has_batch_ ? Contribution{1, 1} : Contribution{0, options_.divisor == JoinDivisor::all_ranks ? 1.0 : 0.0};
            // A sum is a mean whose weights add up to 1.
            case Averaging::sum: return {has_batch_ ? 1.0 : 0.0, backend_.rank() == 0 ? 1.0 : 0.0};
            case Averaging::weighted_mean: return has_batch_ ? Contribution{w, w} : Contribution{0, 0};
            case Averaging::mean_over_count: return has_batch_ ? Contribution{1, w} : Contribution{0, 0};
        }
        return {};
    }

    typename B::WorkType start(std::size_t b) {
        const BufferView bucket = storage_.bucket(b);
        if (!is_floating(bucket.dtype)) {
            if (!has_batch_) std::memset(bucket.data, 0, bucket.bytes());
            if (backend_.size() == 1) return {};
            return backend_.all_reduce(bucket, ReduceOp::sum);
        }
        const Contribution own = contribution();
        if (backend_.size() == 1 && own.scale == own.weight && own.scale != 0) return {};  // x w / w
        return backend_.all_reduce(bucket, ReduceOp::mean, own);
    }

    void launch_full_buckets(bool in_hook) {
        std::lock_guard lock(launching_);
        std::size_t b = flight_.started();
        if (b == flight_.size() || !readiness_.full(b)) return;
        const auto begin = Clock::now();
        auto now = begin;
        for (; b < flight_.size() && readiness_.full(b); ++b) {
            flight_.start(start(b), now);
            now = Clock::now();
        }
        if (in_hook) add_exposed(now - begin);
    }

    void poll(bool in_hook) {
        if (!polling_.try_lock()) return;
        std::lock_guard polling(polling_, std::adopt_lock);
        const auto before = backend_.progress_time();
        flight_.poll();
        if (in_hook) add_exposed(std::chrono::duration_cast<Clock::duration>(backend_.progress_time() - before));
    }

    bool all_ready() const noexcept {
        for (std::size_t b = flight_.started(); b < plan_.size(); ++b)
            if (!readiness_.full(b)) return false;
        return true;
    }

    /// All marks are in, or never will be: settles the gradients that are not ready and launches what is left.
    void close_step() {
        if (closed_) return;
        if (!has_batch_) settle_all();
        else if (!all_ready()) settle_unready();
        launch_full_buckets(false);
        if (options_.unused == UnusedParameters::agree && backend_.size() > 1) {
            if (!has_batch_) std::fill(readiness_.used().begin(), readiness_.used().end(), std::uint8_t{0});
            used_map_work_ = backend_.all_reduce(buffer(readiness_.used()), ReduceOp::max);
        }
        closed_ = true;
    }

    /// Without a batch: what this rank's gradients hold does not matter, but may have to be put back.
    void settle_all() {
        if (options_.unused == UnusedParameters::agree)
            for (std::size_t i : order_) keep(i);
        readiness_.fill_all();
    }

    /// Keeps gradient i, which lives in its bucket, for the case that no rank used it.
    void keep(std::size_t i) {
        if (options_.gradients != GradientStorage::in_buckets) return;
        const BufferView slot = storage_.parameter(i);
        const auto* bytes = static_cast<const std::byte*>(slot.data);
        kept_.push_back(i);
        kept_bytes_.insert(kept_bytes_.end(), bytes, bytes + slot.bytes());
    }

    /// Puts back what nobody used.
    void restore_kept() {
        const std::byte* bytes = kept_bytes_.data();
        for (std::size_t i : kept_) {
            const BufferView slot = storage_.parameter(i);
            if (!readiness_.used()[i] && slot.bytes() != 0) std::memcpy(slot.data, bytes, slot.bytes());
            bytes += slot.bytes();
        }
        kept_.clear();
        kept_bytes_.clear();
    }

    void settle_unready() {
        std::vector<std::size_t> missing;
        for (std::size_t i : order_) {
            const std::uint32_t remaining = readiness_.remaining(i);
            if (remaining == 0) continue;
            const bool partly_marked = remaining != readiness_.uses(i);
            if (readiness_.used()[i] && !partly_marked) {  // its gradient is that of earlier micro-batches
                if (deposits(i) && !deposited_[i]) deposit(i);
            } else if (options_.unused == UnusedParameters::error) {
                missing.push_back(i);
                continue;
            } else if (partly_marked) {
                readiness_.used()[i] = 1;
                if (deposits(i)) deposit(i);
            } else {
                keep(i);
                if (const BufferView slot = storage_.parameter(i); slot.bytes() != 0) std::memset(slot.data, 0, slot.bytes());
            }
            readiness_.settle(i);
        }
        if (!missing.empty()) report_missing(missing);
    }

    /// Waits for the collectives, hands out the results, and prepares the next step.
    void complete_step(Clock::time_point begin) {
        const bool agree = options_.unused == UnusedParameters::agree;
        for (std::size_t b = 0; b < flight_.size(); ++b) {
            if (b == flight_.completed()) flight_.wait(b);
            if (!agree) hand_out(b);
        }
        if (agree) {
            used_map_work_.wait();
            for (std::size_t b = 0; b < flight_.size(); ++b) hand_out(b);
            restore_kept();
        }
        add_exposed(Clock::now() - begin);
        record_statistics();
        readiness_.reset();
        flight_.reset();
        std::fill(deposited_.begin(), deposited_.end(), false);
        recording_ = false;
        has_batch_ = true;
        closed_ = false;
    }

    /// Copies bucket b's results to the trainer's gradients.
    void hand_out(std::size_t b) {
        const bool agree = options_.unused == UnusedParameters::agree;
        for (std::size_t i : plan_.bucket(b))
            if (deposits(i) && (!agree || readiness_.used()[i])) copy(storage_.parameter(i), parameters_[i].gradient);
    }

    template <class Use>
    void for_gradients(Use&& use) {
        for (std::size_t i : order_)
            if (is_floating(parameters_[i].gradient.dtype)) use(gradient_view(i));
    }

    // ----------------------------------------------------------------------------------------------- observation

    void add_exposed(Clock::duration time) noexcept { exposed_.fetch_add(time.count(), std::memory_order_relaxed); }

    void record_statistics() {
        StepStatistics& last = statistics_.last;
        last = {};
        last.exposed_seconds = Flight::seconds(Clock::duration(exposed_.exchange(0, std::memory_order_relaxed)));
        if (backend_.size() > 1) {
            for (std::size_t b = 0; b < flight_.size(); ++b) {
                statistics_.buckets[b] = {storage_.bucket(b).bytes(), flight_.launch_seconds(b), flight_.end_seconds(b)};
                last.bytes += storage_.bucket(b).bytes();
            }
            last.collectives = flight_.size() + (options_.unused == UnusedParameters::agree ? 1 : 0);
            last.communication_seconds = Flight::seconds(flight_.covered());
        }
        statistics_.total += last;
        ++statistics_.steps;
    }

    // ---------------------------------------------------------------------------------------------------- errors

    [[noreturn]] void throw_here(Errc code, const char* operation, const std::string& what, std::string parameter = {}, std::ptrdiff_t bucket = -1) const {
        throw Error(code, std::string(operation) + " on rank " + std::to_string(backend_.rank()) + ": " + what,
                    {.operation = operation, .rank = backend_.rank(), .bucket = bucket, .parameter = std::move(parameter)});
    }

    /// The same where gradients are lost by it: no rank may go on.
    [[noreturn]] void fail(Errc code, const char* operation, const std::string& what, std::string parameter, std::ptrdiff_t bucket) {
        remember_failure(what);
        backend_.fail(what);
        throw_here(code, operation, what, std::move(parameter), bucket);
    }

    /// The first one counts.
    void remember_failure(const std::string& what) {
        std::lock_guard lock(failing_);
        if (failed_.load(std::memory_order_relaxed)) return;
        failure_ = what;
        failed_.store(true, std::memory_order_release);
    }

    void check_index(std::size_t i, const char* operation) const {
        if (i >= parameters_.size())
            throw_here(Errc::invalid_argument, operation, "there is no parameter " + std::to_string(i) + " among " + std::to_string(parameters_.size()));
    }

    /// No gradient was marked since the last `finish()`, but under `no_sync()`.
    void check_between_steps(const char* operation) const {
        if (!readiness_.untouched())
            throw_here(Errc::invalid_argument, operation, "gradients of this step are marked ready already; call finish() first");
    }

    void check_limit(double limit, const char* operation) const {
        if (!(limit >= 0)) throw_here(Errc::invalid_argument, operation, "a limit must be 0 or more, not " + std::to_string(limit));
    }

    void check_usable(const char* operation) const {
        if (failed_.load(std::memory_order_acquire))
            throw_here(Errc::invalid_argument, operation, "this Reducer failed earlier and cannot go on: " + failure_);
    }

    /// Runs what ends the step's consistency if it throws; remembers that it did.
    template <class F>
    decltype(auto) guarded(F&& f) {
        try {
            return f();
        } catch (const std::exception& e) {
            remember_failure(e.what());
            throw;
        }
    }

    [[noreturn]] void refuse_mark(std::size_t i) {
        const ParameterView& p = parameters_[i];
        const auto bucket = static_cast<std::ptrdiff_t>(readiness_.bucket_of(i));
        if (!p.requires_grad)
            fail(Errc::invalid_argument, "mark_ready", "parameter '" + p.name + "' is frozen (requires_grad = false) and takes no marks", p.name, -1);
        fail(Errc::gradient_marked_twice, "mark_ready",
             "parameter '" + p.name + "' (bucket " + std::to_string(bucket) + ") was marked ready more than " +
                 (p.uses == 1 ? "once" : std::to_string(p.uses) + " times") +
                 " before finish(); call finish() each step, put micro-batches before the last under no_sync(), or set its `uses` if it is used more often",
             p.name, bucket);
    }

    [[noreturn]] void report_missing(const std::vector<std::size_t>& missing) {
        constexpr std::size_t named = 5;
        std::string names;
        for (std::size_t k = 0; k < std::min(named, missing.size()); ++k) {
            const std::size_t i = missing[k];
            const std::uint32_t marks = readiness_.uses(i) - readiness_.remaining(i);
            names += (k ? ", '" : "'") + parameters_[i].name + "' (bucket " + std::to_string(readiness_.bucket_of(i)) + ", marked " +
                     std::to_string(marks) + " of " + std::to_string(readiness_.uses(i)) + " times)";
        }
        if (missing.size() > named) names += ", ...";
        fail(Errc::gradient_not_ready, "finish",
             std::to_string(missing.size()) + " of " + std::to_string(order_.size()) + " gradients are not ready: " + names +
                 "; mark every trainable parameter before finish(), freeze it, or choose UnusedParameters::agree",
             parameters_[missing.front()].name, static_cast<std::ptrdiff_t>(readiness_.bucket_of(missing.front())));
    }

    using Flight = detail::Flight<typename B::WorkType>;

    B backend_;
    ReducerOptions options_;
    Buckets bucket_policy_;
    std::vector<ParameterView> parameters_;
    std::vector<ParameterInfo> infos_;
    std::vector<std::size_t> order_;  ///< trainable parameters, as their gradients are expected to become ready
    BucketPlan plan_;
    detail::BucketStorage<B> storage_;
    detail::Readiness readiness_;
    Flight flight_;
    detail::GradientNorm norm_;
    typename B::WorkType used_map_work_;
    Statistics statistics_;

    std::vector<char> deposited_;  ///< the bucket holds gradients of earlier micro-batches, to be added to
    std::vector<std::size_t> kept_;      ///< gradients to put back if nobody used them
    std::vector<std::byte> kept_bytes_;  ///< what they held, one after the other
    std::atomic<int> no_sync_depth_{0};
    double weight_ = 1;
    bool has_batch_ = true;
    bool closed_ = false;     ///< all marks of this step are settled
    bool recording_ = true;

    detail::SpinLock launching_;
    detail::SpinLock polling_;
    detail::SpinLock failing_;
    std::atomic<Clock::rep> exposed_{0};
    std::atomic<bool> failed_{false};
    std::string failure_;

    Engine<true> hook_{*this};
    Engine<false> background_{*this};
    Overlap overlap_;
};

template <class B, class Range>
Reducer(B, Range&&) -> Reducer<B>;
template <class B, class Range>
Reducer(B, Range&&, ReducerOptions) -> Reducer<B>;
template <class B, class Range, class Buckets>
Reducer(B, Range&&, ReducerOptions, Buckets) -> Reducer<B, Buckets>;
template <class B, class Range, class Buckets, class Overlap>
Reducer(B, Range&&, ReducerOptions, Buckets, Overlap) -> Reducer<B, Buckets, Overlap>;

}  // namespace gradsync::inline v0
