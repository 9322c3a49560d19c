// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "guard.hpp"
#include "ready_order.hpp"
#include "step.hpp"

namespace gradsync::inline v0_2::detail {

/// The first half of a step: gradients become ready, are copied or added up, and full buckets are launched.
/// `GradientEngine` has the second.
template <class B>
class Marking : public Guard<B> {
protected:
    static constexpr std::size_t worth_timing =
        16384;  ///< bytes; copying fewer is no slower than reading the clock twice
    static constexpr std::size_t worth_polling =
        16384;  ///< bytes; computing the gradients of fewer is no slower than a poll

    using Guard<B>::backend_, Guard<B>::check_index, Guard<B>::check_limit, Guard<B>::check_root,
        Guard<B>::check_usable, Guard<B>::fail, Guard<B>::guard, Guard<B>::refuse;

public:
    using Guard<B>::failed;

    bool begin_step(bool has_batch = true) {
        check_usable("begin_step");
        check_between_steps("begin_step");
        if (!has_batch && gradients_.dealt().several() && !gradients_.pooled())
            refuse("begin_step", text("every rank needs a batch here; give this one some, or set micro_batches to ",
                                      backend_.size(), " times a power of two, not ", options_.micro_batches));
        std::int32_t live = has_batch ? 1 : 0;
        guard([&] { host_of(backend_).all_reduce(BufferView(&live, 1), ReduceOp::sum).wait(); });
        set_has_batch(has_batch || live == 0, live < backend_.size());  // if no rank has a batch, no step follows
        return live > 0;
    }

    void set_weight(double weight) {
        check_usable("set_weight");
        if (!is_weighted(options_.averaging))
            refuse("set_weight",
                   "weights go with Averaging::weighted_mean or mean_over_count; choose one in ReducerOptions");
        constexpr double least = 0x1p-126, most = 0x1.fffffep127;  // of f32
        if (weight != 0 && !(weight >= least && weight <= most))
            refuse("set_weight", text("a weight must be 0, or from 1.2e-38 to 3.4e38, not ", weight));
        if (step_.launched() != 0)
            refuse("set_weight",
                   "buckets of this step are in flight already; set the weight before the first mark_ready()");
        step_.set_weight(weight);
    }

    NoSync no_sync() {
        check_usable("no_sync");
        if (gradients_.pooled())
            refuse("no_sync", "pooled gradients do not outlive a backward; reduce each micro-batch with finish()");
        if (step_.launched() != 0) refuse("no_sync", "buckets of this step are in flight already; call finish() first");
        if (options_.micro_batches != 0 && gradients_.sums().over() + 1 >= gradients_.sums().due())
            refuse("no_sync", text("this is the last micro-batch of a step, which has ", gradients_.sums().due(),
                                   " on this rank; mark it without the guard, and call finish()"));
        unsynchronised_ += one_guard;
        return NoSync(this, [](void* self, bool unwinds) { static_cast<Marking*>(self)->end_no_sync(unwinds); });
    }

    void discard() {
        check_usable("discard");
        check_between_steps("discard");
        if (unsynchronised_.load(std::memory_order_relaxed) >= one_guard)
            refuse("discard", "a guard of no_sync() lives; destroy it first");
        readiness_.reset();
        gradients_.sums().forget();
        skips_ = false;
    }
    /// Between steps: was a micro-batch marked under `no_sync()` since the last `finish()`, or does a guard still live?
    bool accumulates() const noexcept {
        return unsynchronised_.load(std::memory_order_relaxed) >= one_guard ||
               (between_steps() && readiness_.any_used());
    }

    /// Inlined into the trainer's backward: a mark takes nanoseconds.
    GRADSYNC_ALWAYS_INLINE void mark_ready(std::size_t i) {
        check_index(i, parameters().size(), "mark_ready");
        check_usable("mark_ready");
        switch (readiness_.mark(i)) {
            case Readiness::Mark::more_to_come: return;
            case Readiness::Mark::too_often: refuse_mark(i);
            case Readiness::Mark::ready: break;
        }
        if (is_arriving(i)) refuse_unwaited(i);
        if (gradients_.pooled() && !gradients_.was_asked_for(i)) refuse_unasked(i);
        const unsigned unsynchronised = unsynchronised_.load(std::memory_order_relaxed);
        if (unsynchronised & without_batch) return readiness_.rearm(i);
        if (checks_gradients_) check_gradient(i);
        const bool synchronises = unsynchronised == 0;
        const bool copies =
            synchronises ? gradients_.is_deposited(i) : options_.accumulation == Accumulation::in_buckets;
        // A gradient must not be copied twice. If a copy adds, the claim is exact even for two simultaneous marks.
        if (copies && !readiness_.claim(i, options_.accumulation == Accumulation::in_buckets)) refuse_mark(i);
        if (!synchronises) {
            if (unsynchronised & finishing) fail_at(i, "mark_ready", in_finish);
            readiness_.used()[i] = 1;
            if (copies) add_up(i, "mark_ready");
            return readiness_.rearm(i);
        }
        const std::size_t bytes = gradients_.bytes_of(i);
        if (copies) {
            if (bytes < worth_timing) {
                gradients_.deposit(i);
            } else {
                const auto held = step_.watch().hold(Activity::copy, i);
                gradients_.deposit(i);
            }
        }
        if (marks_watched_) watch_mark(i);
        readiness_.used()[i] = 1;  // set before the fill: a full step may end at once
        const auto filled = readiness_.fill(i);
        if (filled == Readiness::Fill::too_often) refuse_mark(i);
        if (step_.is_single_rank()) return;  // nothing travels; finish() does the scaling
        const bool full = filled == Readiness::Fill::bucket_full;
        // Simultaneous marks may count as one here: a lost update only delays a poll.
        const std::size_t unpolled = unpolled_bytes_.load(std::memory_order_relaxed) + bytes;
        const bool poll = full || unpolled >= worth_polling;
        unpolled_bytes_.store(poll ? 0 : unpolled, std::memory_order_relaxed);
        if (!poll) return;
        guard([&] {
            if (full && written_.checked()) check_written(readiness_.bucket_of(i), "mark_ready");
            if (full) overlap_.bucket_full(hook_);
            if (full || step_.in_flight()) overlap_.gradients_ready(hook_);
        });
    }

    /// See Reducer. Out of line, unlike a single mark.
    [[gnu::noinline]] void mark_ready(std::span<const std::size_t> which) {
        for (const std::size_t i : which) mark_ready(i);
    }
    [[gnu::noinline]] void mark_ready(std::string_view name) {
        mark_ready(index_of(name, parameters(), backend_.rank()));
    }
    [[gnu::noinline]] void mark_ready() {
        const bool adds_up = unsynchronised_ >= one_guard && options_.accumulation == Accumulation::in_buckets;
        if (adds_up && options_.micro_batches == 0)
            refuse("mark_ready",
                   "this call cannot tell which gradients of the micro-batch are added up already; mark each by its "
                   "index, or set ReducerOptions::micro_batches");
        for (const std::size_t i : gradients_.order())
            for (auto n = adds_up && gradients_.sums().has(i) ? 0 : readiness_.remaining(i); n != 0; --n) mark_ready(i);
    }

    /// The memory of gradient i.
    BufferView gradient_view(std::size_t i) const {
        check_index(i, parameters().size(), "gradient_view");
        check_usable("gradient_view");
        if (gradients_.parameter(i).requires_grad && is_arriving(i))
            refuse("gradient_view",
                   text("the average of '", name(i), "' is in flight; call acquire(", i,
                        ") on what finish() has returned"),
                   name(i));
        return gradients_.gradient(i);
    }
    /// The memory to write gradient i to. With pooled gradients the call may wait for a slot.
    BufferView acquire_gradient(std::size_t i, bool more = false) {
        check_index(i, parameters().size(), "acquire_gradient");
        check_usable("acquire_gradient");
        if (gradients_.pooled() && gradients_.parameter(i).requires_grad) {
            obtain(readiness_.bucket_of(i), "acquire_gradient", more);
            gradients_.ask_for(i);
        }
        return gradients_.gradient(i);
    }

    /// Moves the borrowed gradient i to another memory.
    void rebind_gradient(std::size_t i, BufferView gradient) {
        check_index(i, parameters().size(), "rebind_gradient");
        check_usable("rebind_gradient");
        check_between_steps("rebind_gradient");
        if (gradients_.parameter(i).requires_grad && is_arriving(i))
            refuse("rebind_gradient", text("the average of '", name(i), "' is in flight; acquire it first"), name(i));
        const BufferView own = gradients_.parameter(i).gradient;
        if (options_.gradients != GradientStorage::borrowed || !may_replace(gradient, own))
            refuse(
                "rebind_gradient",
                text("the new memory of '", name(i), "' must be a borrowed gradient of the same count, type and space"),
                name(i));
        if (!gradients_.rebind(i, readiness_.bucket_of(i), gradient))
            refuse("rebind_gradient",
                   text("'", name(i),
                        "' is part of an arena in device memory, which is a bucket; make a new Reducer to move it"),
                   name(i));
    }

    /// Was no gradient marked since the last `finish()`, except under `no_sync()`?
    bool between_steps() const noexcept { return readiness_.untouched(); }
    /// The same, and no mark of several uses was made either.
    bool unmarked() const noexcept { return readiness_.unmarked(); }
    const BucketPlan& plan() const noexcept { return gradients_.plan(); }
    const B& backend() const noexcept { return backend_; }
    ListView<const ParameterView> parameters() const noexcept { return gradients_.parameters(); }

protected:
    /// The engine as the overlap policy sees it. Work in hooks counts as exposed; work in a background thread of the
    /// policy does not.
    class Hooks final : public BucketEngine {
    public:
        Hooks(Marking& marking, bool in_hook) noexcept : marking_(marking), in_hook_(in_hook) {}
        /// With check_writes, buckets are launched in `finish()`, because a reduction in place also writes.
        void launch_full_buckets() override {
            if (!marking_.written_.checked()) marking_.step_.launch_full_buckets(in_hook_);
        }
        bool in_flight() const noexcept override { return marking_.step_.in_flight(); }
        void poll() override { marking_.step_.poll(in_hook_); }
        bool wants_thread() const noexcept override { return wants_progress_thread(marking_.backend_); }

    private:
        Marking& marking_;
        bool in_hook_;
    };

    /// Takes the policies except the name of the exchange.
    [[gnu::cold]] Marking(const B& backend, const char* owner, List<ParameterView> parameters,
                          const ReducerOptions& options, Policies<B>& policies)
        : Guard<B>(backend, owner),
          scatters_(policies.exchange->traits.scatters && !policies.decoupled),
          decoupled_(policies.decoupled),
          options_(checked(with_storage(options, GradientStorage::borrowed), !policies.packs, policies.sums)),
          bucket_policy_(std::move(policies.buckets)),
          gradients_(backend_, std::move(parameters), options_, bucket_policy_, policies),
          step_(backend_, options_, gradients_, readiness_, std::move(policies.exchange)),
          overlap_(std::move(policies.overlap)) {}
    ~Marking() = default;

    /// Runs before anything is constructed, so that a refused rank may try again. `plain`: the exchange is AllReduce.
    /// `sums`: see Policies.
    [[gnu::cold]] ReducerOptions checked(const ReducerOptions& options, bool plain, bool sums) const {
        check_options(options, B::memory_space, scatters_, plain, sums, backend_.rank(), backend_.size());
        ReducerOptions checked = options;
        if (options.micro_batches ==
            static_cast<std::size_t>(backend_.size()))  // each rank has one, so nothing is added up
            checked.accumulation = Accumulation::in_gradients;
        else if (options.micro_batches != 0 &&
                 options.gradients == GradientStorage::pooled)  // nothing else adds them up
            checked.accumulation = Accumulation::in_buckets;
        checked.check_writes |= B::memory_space == MemorySpace::host && WrittenGradients::asked_for();
        return checked;
    }

    /// Throws Error(invalid_argument) if this is not the last of this rank's micro-batches.
    void check_micro_batches(const char* operation) const {
        if (options_.micro_batches == 0 || !step_.has_batch() || gradients_.pooled()) return;
        const std::size_t due = gradients_.sums().due(), marked = gradients_.sums().over() + 1;
        if (marked != due)
            refuse(operation, text("this is micro-batch ", marked, " of the step, and not the last of ", due,
                                   "; put all but the last under no_sync(), or give ReducerOptions::micro_batches "
                                   "their number on all ranks"));
    }

    void set_has_batch(bool has_batch, bool some_have_none = false) noexcept {
        step_.set_has_batch(has_batch, some_have_none);
        if (has_batch) unsynchronised_ &= ~without_batch;
        else unsynchronised_ |= without_batch;
    }

    void add_up(std::size_t i, const char* operation) {
        if (!gradients_.sums().has_room(i))
            fail_at(i, operation,
                    "this micro-batch is one too many under no_sync(): each guard counts as one; after a bad batch "
                    "call discard()");
        gradients_.add_up(i);
    }

    /// Ends a guard. After the last guard, or if an exception ended the micro-batch, incomplete marks are reset for the
    /// next micro-batch.
    void end_no_sync(bool unwinds) noexcept {
        const bool last = (unsynchronised_ -= one_guard) < one_guard;
        if (!(last || unwinds) || failed()) return;
        try {
            guard([&] {
                for (std::size_t i : gradients_.order()) {
                    const std::uint32_t remaining = readiness_.remaining(i);
                    if (remaining == 0 || remaining == readiness_.uses(i)) continue;
                    readiness_.rearm(i);
                    if (unwinds || !step_.has_batch()) continue;
                    check_gradient(i);
                    readiness_.used()[i] = 1;
                    if (options_.accumulation == Accumulation::in_buckets) add_up(i, "no_sync");
                }
                if (last) gradients_.sums().end_micro_batch();
            });
        } catch (...) {  // every later call reports the failure
        }
    }

    /// With OverlapForward: is the average of gradient i still to be waited for?
    bool is_arriving(std::size_t i) const noexcept {
        return gathers_.pending() != 0 && gathers_.pending(readiness_.bucket_of(i));
    }

    /// While it lives, a mark is an error: too late for the step that ends, too early for the next.
    class Finishing {
    public:
        Finishing(Marking& marking, const char* operation) : marking_(marking) {
            if ((marking.unsynchronised_.fetch_or(finishing) & finishing) != 0) marking.refuse(operation, in_finish);
        }
        Finishing& operator=(Finishing&&) = delete;
        ~Finishing() { marking_.unsynchronised_ &= ~finishing; }

    private:
        Marking& marking_;
    };

    /// Pooled gradients: gives bucket b a slot. If all are taken, it adds one (`more`), or else first waits for buckets
    /// in flight.
    void obtain(std::size_t b, const char* operation, bool more = false) {
        check_usable(operation);
        guard([&] {
            while (!gradients_.obtain(b, more)) {
                step_.launch_full_buckets(true);
                if (step_.complete_one()) continue;
                // Nothing is in flight, so the slots are held by several threads at once, or by an unexpected order of
                // marks.
                if (gradients_.obtain(b, true)) return;
                fail_at(plan().bucket(b).front(), operation,
                        text("there is no memory for bucket ", b,
                             step_.has_batch() ? ": too many buckets are open; on devices ask in reverse order of "
                                                 "registration (docs/guides/sharding.md)"
                                               : ": this rank has no batch, and marks nothing; ask for no gradients "
                                                 "after begin_step(false)"));
            }
        });
    }

    /// Sets one flag for all marks, because most steps are neither recorded nor observed.
    void watch_marks() noexcept {
        marks_watched_ = ready_order_.recording() || options_.observer != nullptr || written_.checked();
    }
    void watch_mark(std::size_t i) {
        if (ready_order_.recording()) ready_order_.record(i);
        step_.watch().ready(i);
        if (written_.checked()) written_.mark(i, gradients_.gradient(i));
    }

    /// Fails if a gradient of bucket b, which was not launched, has changed since its mark.
    [[gnu::cold]] void check_written(std::size_t b, const char* operation) {
        for (std::size_t i : plan().bucket(b))
            if (written_.since_mark(i, gradients_.gradient(i)))
                fail_at(i, operation,
                        text("the gradient of '", name(i),
                             "' was written after its mark; mark it when its last contribution is in (a parameter that "
                             "several layers use: register it once, with as many `uses`), and let no other thread "
                             "write it before finish() returns"));
    }

    const std::string& name(std::size_t i) const noexcept { return gradients_.parameter(i).name; }

    /// Refuses a call if gradients were marked since the last `finish()`, except under `no_sync()`.
    void check_between_steps(const char* operation) const {
        if (!readiness_.untouched())
            refuse(operation, "some gradients of this step are marked; mark the rest, and call finish() first");
    }

    static constexpr const char* in_finish =
        "another thread is in finish(); end the backward on all threads, then call finish() on one";
    /// Fails because of gradient i.
    [[noreturn, gnu::cold, gnu::noinline]] void fail_at(std::size_t i, const char* operation, const std::string& what,
                                                        Errc code = Errc::invalid_argument) {
        fail(code, operation, what, name(i), readiness_.bucket_of(i));
    }

    /// Fails if gradient i is no longer where it was registered.
    void check_place(std::size_t i, const char* operation) {
        const ParameterView& p = gradients_.parameter(i);
        if (!tracks_ || p.look == nullptr || !p.requires_grad) return;
        const BufferView now = p.look(p.owner);
        if (now == p.gradient) return;
        fail_at(
            i, operation,
            text("the gradient of '", p.name, "' ",
                 now.count == p.gradient.count ? "moved"
                                               : text("has ", now.count, " elements now, and had ", p.gradient.count),
                 "; call rebind_gradient() between steps when its memory has moved, and make a new Reducer if its size "
                 "changes"));
    }

    /// The checks of a mark that options or parameters ask for.
    void check_gradient(std::size_t i) {
        check_place(i, "mark_ready");
        if (options_.non_finite == NonFinite::pass || kernel::all_finite(gradients_.gradient(i))) return;
        if (options_.non_finite == NonFinite::error)
            fail_at(i, "mark_ready",
                    text("the gradient of '", name(i),
                         "' has an element that is infinite or NaN; lower the learning rate or the loss scale, or "
                         "skip such steps (NonFinite::skip)"),
                    Errc::non_finite);
        skips_.store(true, std::memory_order_relaxed);
    }

    [[noreturn, gnu::cold, gnu::noinline]] void refuse_unwaited(std::size_t i) {
        fail_at(i, "mark_ready",
                "the average of the last step was not waited for; call acquire(i) on what finish() returned before "
                "parameter i is stepped and used");
    }

    [[noreturn, gnu::cold, gnu::noinline]] void refuse_unasked(std::size_t i) {
        fail_at(i, "mark_ready",
                text("the memory of '", name(i),
                     "' was not asked for in this backward; call acquire_gradient(i) before its gradient is written"));
    }

    [[noreturn, gnu::cold, gnu::noinline]] void refuse_mark(std::size_t i) {
        if ((unsynchronised_.load(std::memory_order_relaxed) & finishing) != 0) fail_at(i, "mark_ready", in_finish);
        const std::string what = marked_too_often(gradients_.parameter(i), readiness_.bucket_of(i), readiness_.ended());
        if (!gradients_.parameter(i).requires_grad) refuse("mark_ready", what, name(i));
        fail_at(i, "mark_ready", what, Errc::gradient_marked_twice);
    }

    const bool scatters_;   ///< this rank gets only its shards
    const bool decoupled_;  ///< `finish()` leaves half of the all-reduce to be waited for
    ReducerOptions options_;
    AnyBuckets bucket_policy_;
    GradientBuckets<B> gradients_;
    Readiness readiness_{uses_of(gradients_.parameters()), gradients_.plan()};
    Step<B> step_;
    const bool tracks_ = options_.gradients == GradientStorage::borrowed && any_tracked(gradients_.parameters());
    const bool checks_gradients_ = tracks_ || options_.non_finite != NonFinite::pass;
    std::atomic<bool> skips_{false};  ///< a gradient of this rank has an element that is not finite
    ReadyOrder<B> ready_order_{backend_, bucket_policy_.plans_by_times()};
    DeferredGather<B> gathers_;  ///< only if decoupled
    WrittenGradients written_{options_.check_writes ? gradients_.parameters().size() : 0};

    static constexpr unsigned without_batch = 1, finishing = 2, one_guard = 4;
    std::atomic<unsigned> unsynchronised_{
        0};  ///< why marks synchronise nothing: the flags above, and one_guard per `no_sync()` guard
    bool marks_watched_ = false;                  ///< marks are recorded, observed or checked
    std::atomic<std::size_t> unpolled_bytes_{0};  ///< of gradients marked since the policy was last told

    Hooks hook_{*this, true}, background_{*this, false};
    AnyOverlap overlap_;
};

}  // namespace gradsync::inline v0_2::detail
