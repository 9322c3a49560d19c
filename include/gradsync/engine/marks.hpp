// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "guard.hpp"
#include "in_flight.hpp"
#include "no_sync.hpp"
#include "phases.hpp"
#include "ready_order.hpp"

namespace gradsync::inline v0_2::detail {

/// Tracks which gradients are ready. A mark brings its gradient into its bucket, tells the overlap policy when a bucket
/// is full, and now and then lets the policy advance what is in flight. It also knows the phase of the step.
///
/// `mark_ready(i)` and `acquire_gradient` are thread-safe. `all_ready` and `name_unready` may run while threads mark.
/// Call the others from one thread, while no thread marks.
template <class B>
class Marks {
    /// In bytes: copying fewer is no slower than reading the clock twice.
    static constexpr std::size_t worth_timing = 16384;
    /// In bytes: computing the gradients of fewer is no slower than a poll.
    static constexpr std::size_t worth_polling = 16384;

public:
    /// The references must outlive this object.
    [[gnu::cold]] Marks(Guard<B>& guard, const ReducerOptions& options, GradientHome<B>& home, Readiness& readiness,
                        InFlight<B>& in_flight, AnyOverlap& overlap, const DeferredGather<B>& gathers, bool timed)
        : guard_(guard),
          options_(options),
          home_(home),
          readiness_(readiness),
          in_flight_(in_flight),
          overlap_(overlap),
          gathers_(gathers),
          order_(guard.backend(), timed),
          written_(options.check_writes ? home.planned().size() : 0) {}
    Marks& operator=(Marks&&) = delete;

    // ------------------------------------------------------------------------------------------- what a trainer calls

    /// Inlined into the trainer's backward: a mark takes nanoseconds.
    GRADSYNC_ALWAYS_INLINE void mark_ready(std::size_t i) {
        guard_.check_index(i, planned_.size(), "mark_ready");
        guard_.check_usable("mark_ready");
        switch (readiness_.mark(i)) {
            case Readiness::Mark::more_to_come: return;
            case Readiness::Mark::too_often: refuse_mark(i);
            case Readiness::Mark::ready: break;
        }
        if (is_arriving(i)) refuse_unwaited(i);
        if (home_.pooled() && asked_for_[i] == 0) refuse_unasked(i);
        const unsigned unsynchronised = unsynchronised_.load(std::memory_order_relaxed);
        if (unsynchronised & without_batch) return readiness_.rearm(i);
        if (checks_gradients_) check_gradient(i);
        const bool synchronises = unsynchronised == 0;
        const bool copies = synchronises ? home_.row(i).deposited : adds_up();
        // A gradient must not be copied twice. If a copy adds, the claim is exact even for two simultaneous marks.
        if (copies && !readiness_.claim(i, adds_up())) refuse_mark(i);
        if (!synchronises) return mark_unsynchronised(i, unsynchronised);
        if (copies) deposit(i);
        if (watched_) watch_mark(i);
        readiness_.used()[i] = 1;  // set before the fill: a full step may end at once
        const auto filled = readiness_.fill(i);
        if (filled == Readiness::Fill::too_often) refuse_mark(i);
        if (in_flight_.is_single_rank()) return;  // nothing travels; finish() does the scaling
        const bool full = filled == Readiness::Fill::bucket_full;
        // Simultaneous marks may count as one here: a lost update only delays a poll.
        const std::size_t unpolled = unpolled_bytes_.load(std::memory_order_relaxed) + home_.row(i).bytes;
        const bool poll = full || unpolled >= worth_polling;
        unpolled_bytes_.store(poll ? 0 : unpolled, std::memory_order_relaxed);
        if (poll) tell_policy(i, full);
    }
    /// See Reducer. Out of line, unlike a single mark.
    [[gnu::noinline]] void mark_ready(std::span<const std::size_t> which) {
        for (const std::size_t i : which) mark_ready(i);
    }
    [[gnu::noinline]] void mark_ready(std::string_view name) {
        mark_ready(index_of(name, planned_.parameters(), named_rank(guard_.backend())));
    }
    [[gnu::noinline]] void mark_ready() {
        const bool under_guard = unsynchronised_ >= one_guard && adds_up();
        if (under_guard && options_.micro_batches == 0)
            guard_.refuse("mark_ready", "this call cannot tell which gradients of the micro-batch ",
                          "are added up already; mark each by its index, or set ReducerOptions::micro_batches");
        bool any = false;
        for (const std::size_t i : planned_.order())
            for (auto n = under_guard && home_.sums().has(i) ? 0 : readiness_.remaining(i); n != 0; --n) {
                mark_ready(i);
                any = true;
            }
        if (under_guard) home_.sums().end_marked();
        if (under_no_sync() || !contribution_.has_batch || planned_.order().empty()) return;
        if (!any && has_ended())
            guard_.refuse("mark_ready", "try_finish() has ended the backward; first call it until it returns true");
        // Twice in a step, and nothing is left: then finish() was forgotten, and ranks would train apart.
        if (std::exchange(rest_is_marked_, true) && !any)
            guard_.refuse("mark_ready", "it was called twice in this step, and no gradient is left to mark; ",
                          "call finish() in each step");
    }
    /// `mark_ready` for a gradient that its producer left in `gradient`.
    void mark_ready(std::size_t i, const BufferView& gradient) {
        guard_.check_index(i, planned_.size(), "mark_ready");
        guard_.check_usable("mark_ready");
        const BufferView own = home_.gradient(i);
        if (!may_replace(gradient, own))
            guard_.refuse({.operation = "mark_ready", .parameter = name(i)}, "the gradient of '", name(i),
                          "' has another count, type or space now, or no memory that is aligned for its type");
        const bool refused = own.data == nullptr || readiness_.remaining(i) == 0 || is_arriving(i);  // reported below
        if (!refused && gradient.data != own.data &&
            !(options_.gradients == GradientStorage::borrowed && home_.rebind(i, readiness_.bucket_of(i), gradient))) {
            const auto held = in_flight_.watch().hold(Activity::copy, i);
            passes_of(guard_.backend()).copy(gradient, own);
        }
        mark_ready(i);
    }

    /// The memory to write gradient i to. With pooled gradients the call may wait for a slot, or with `more` adds one.
    BufferView acquire_gradient(std::size_t i, bool more = false) {
        guard_.check_index(i, planned_.size(), "acquire_gradient");
        guard_.check_usable("acquire_gradient");
        if (home_.pooled() && planned_[i].requires_grad) {
            obtain(readiness_.bucket_of(i), "acquire_gradient", more);
            asked_for_[i] = 1;
        }
        return home_.gradient(i);
    }

    NoSync no_sync() {
        check_phase("no_sync");
        if (home_.pooled())
            guard_.refuse("no_sync",
                          "pooled gradients do not outlive a backward; reduce each micro-batch with finish()");
        const MicroBatchSums<B>& sums = home_.sums();
        if (options_.micro_batches != 0 && sums.over() + 1 >= sums.due())
            guard_.refuse("no_sync", "this is the last micro-batch of a step, which has ", sums.due(),
                          " on this rank; mark it without the guard, and call finish()");
        unsynchronised_ += one_guard;
        return NoSync(this, [](void* self, bool unwinds) { static_cast<Marks*>(self)->end_no_sync(unwinds); });
    }

    void discard() {
        check_phase("discard");
        if (under_no_sync()) guard_.refuse("discard", "a guard of no_sync() lives; destroy it first");
        skips_ = false;
        forget();
    }

    // --------------------------------------------------------------------------------------------- where a step is

    Phase phase() const noexcept {
        if (has_ended()) return base_.load(std::memory_order_relaxed);
        if (in_flight_.launched() != 0) return Phase::launched;
        if (!readiness_.untouched()) return Phase::marked;
        if (readiness_.any_used()) return Phase::accumulated;
        return base_.load(std::memory_order_relaxed);
    }
    /// Refuses a call if this object has failed, or in a phase that does not allow it.
    void check_phase(CheckedCall call) const {
        guard_.check_usable(call.name);
        if (const char* const refusal = call.refusal(phase())) guard_.refuse(call.name, refusal);
    }
    /// Was no gradient marked since the last `finish()`, except under `no_sync()`?
    bool between_steps() const noexcept { return readiness_.untouched(); }
    /// Between steps: was a micro-batch marked under `no_sync()` since the last `finish()`, or does a guard still live?
    bool accumulates() const noexcept { return under_no_sync() || phase() == Phase::accumulated; }
    /// Is no gradient marked, not even fewer times than it has uses?
    bool unmarked() const noexcept { return readiness_.unmarked(); }
    /// With OverlapForward: is the average of gradient i still to be waited for?
    bool is_arriving(std::size_t i) const noexcept {
        return gathers_.pending() != 0 && gathers_.pending(readiness_.bucket_of(i));
    }
    bool all_ready() const noexcept {
        for (std::size_t b = in_flight_.launched(); b < planned_.plan().size(); ++b)
            if (!readiness_.full(b)) return false;
        return true;
    }

    // ------------------------------------------------------------------------------------------ the end of a backward

    void set_has_batch(bool has_batch, bool some_have_none = false) noexcept {
        contribution_.has_batch = has_batch;
        contribution_.some_have_none = some_have_none;
        if (has_batch) unsynchronised_ &= ~without_batch;
        else unsynchronised_ |= without_batch;
    }

    struct Reopen {  ///< ends an Ending
        void operator()(Marks* marks) const noexcept { marks->unsynchronised_ &= ~finishing; }
    };
    /// While it lives, a mark is an error: too late for the step that ends, too early for the next.
    using Ending = std::unique_ptr<Marks, Reopen>;
    Ending end(const char* operation) {
        guard_.check_usable(operation);
        if (gathers_.pending() != 0 && phase() != Phase::closed)
            guard_.refuse(
                operation,
                "averages of the last step were not waited for; "
                "call acquire(i) on what finish() returned before parameter i is stepped and used, or wait()");
        check_last_micro_batch(operation, guard_.backend(), home_, contribution_);
        for (std::size_t i = 0; tracks_ && i < planned_.size(); ++i) check_place(i, operation);
        if (options_.unused == UnusedParameters::error) check_apart(operation, nullptr);
        if ((unsynchronised_.fetch_or(finishing) & finishing) != 0) guard_.refuse(operation, in_finish);
        return Ending(this);
    }
    /// Fails if two gradients that get averages lie in the same memory since one of them moved there. Not when it
    /// moves: two gradients may swap their memory. `get`: 0 for those that get none; null if all do.
    void check_apart(const char* operation, const std::uint8_t* get) {
        if (!home_.planned().some_moved()) return;
        const List<ParameterView>& all = planned_.parameters();
        if (overlapping<&ParameterView::gradient>(all).first == nullptr) return home_.planned().note_apart();
        if (const auto [one, other] = overlapping<&ParameterView::gradient>(all, get); one)
            fail_at(static_cast<std::size_t>(other - all.data()), operation,
                    text("the gradients of '", one->name, "' and '", other->name,
                         "' share memory since one of them moved there; give each its own"));
    }
    /// Settles the gradients that are not ready. Without a batch this rank's gradients do not count,
    /// but may have to be restored.
    void settle() {
        if (has_ended()) return;
        base_.store(Phase::ended, std::memory_order_relaxed);
        if (contribution_.has_batch) {
            if (!all_ready()) settle_unready();
            return;
        }
        if (options_.unused == UnusedParameters::find_unused)
            for (const std::size_t i : planned_.order()) home_.keep(i);
        for (std::size_t b = in_flight_.launched(); b < planned_.plan().size(); ++b) {
            if (home_.pooled()) obtain(b, "finish");
            readiness_.fill_all(b, planned_.plan().bucket(b));
        }
    }
    /// Fails, naming the gradients that are not ready. Other threads may be marking.
    [[gnu::cold]] void name_unready() { settle_unready(true); }
    /// Checks for late writes, launches the remaining buckets, and ends the marks of the step.
    void close() {
        for (std::size_t b = in_flight_.launched(); written_.checked() && b < planned_.plan().size(); ++b)
            check_written(b, "finish");
        written_.reset();
        in_flight_.launch_full_buckets(false, true);
        if (!contribution_.has_batch) readiness_.used().fill(0);
        readiness_.used().back() = skips_.exchange(false, std::memory_order_relaxed) && contribution_.has_batch;
        base_.store(Phase::closed, std::memory_order_relaxed);
    }
    /// Prepares the next step. Without `close()` before, there are no averages.
    void reset() {
        forget();
        written_.reset();
        const bool averaged = base_.load(std::memory_order_relaxed) == Phase::closed;
        base_.store(averaged ? Phase::averaged : Phase::fresh, std::memory_order_relaxed);
        set_has_batch(true);
    }

    /// The order and the times of marks, as far as they are recorded.
    ReadyOrder<B>& order() noexcept { return order_; }
    /// Sets one flag for all marks, because most steps are neither recorded nor observed.
    void watch() noexcept { watched_ = order_.recording() || options_.observer != nullptr || written_.checked(); }

private:
    /// Forgets the marks and sums of the step.
    void forget() {
        readiness_.reset();
        home_.sums().forget();
        asked_for_.fill(0);
        rest_is_marked_ = false;
    }
    bool has_ended() const noexcept {
        const Phase base = base_.load(std::memory_order_relaxed);
        return base == Phase::ended || base == Phase::closed;
    }
    bool adds_up() const noexcept { return options_.accumulation == Accumulation::in_buckets; }
    bool under_no_sync() const noexcept { return unsynchronised_.load(std::memory_order_relaxed) >= one_guard; }
    const std::string& name(std::size_t i) const noexcept { return planned_[i].name; }

    // ----------------------------------------------------------------------------------------- the way into a bucket

    GRADSYNC_ALWAYS_INLINE void deposit(std::size_t i) {
        if (home_.row(i).bytes < worth_timing) return home_.deposit(i);
        const auto held = in_flight_.watch().hold(Activity::copy, i);
        home_.deposit(i);
    }
    void mark_unsynchronised(std::size_t i, unsigned why) {
        if (why & finishing) fail_at(i, "mark_ready", in_finish);
        readiness_.used()[i] = 1;
        if (adds_up()) add_up(i, "mark_ready");
        readiness_.rearm(i);
    }
    void add_up(std::size_t i, const char* operation) {
        if (!home_.sums().has_room(i))
            fail_at(i, operation,
                    "this micro-batch is one too many under no_sync(): each guard counts as one; after a bad batch "
                    "call discard()");
        home_.add_up(i);
    }
    void tell_policy(std::size_t i, bool full) {
        try {
            if (full && written_.checked()) check_written(readiness_.bucket_of(i), "mark_ready");
            if (full) overlap_.bucket_full(in_flight_.hook());
            if (full || in_flight_.in_flight()) overlap_.gradients_ready(in_flight_.hook());
        } catch (...) {
            guard_.give_up();
            throw;
        }
    }
    void watch_mark(std::size_t i) {
        if (order_.recording()) order_.record(i);
        in_flight_.watch().ready(i);
        if (written_.checked()) written_.mark(i, home_.gradient(i));
    }

    /// Pooled gradients: gives bucket b a slot. If all are taken, it adds one (`more`), or else first
    /// waits for buckets in flight.
    void obtain(std::size_t b, const char* operation, bool more = false) {
        guard_.check_usable(operation);
        guard_.run([&] {
            while (!home_.obtain(b, more)) {
                in_flight_.launch_full_buckets(true);
                if (in_flight_.complete_one()) continue;
                // Nothing is in flight, so the slots are held by several threads at once,
                // or by an unexpected order of marks.
                if (home_.obtain(b, true)) return;
                fail_at(planned_.plan().bucket(b).front(), operation,
                        text("there is no memory for bucket ", b,
                             contribution_.has_batch
                                 ? ": too many buckets are open; on devices ask in reverse order of registration "
                                   "(docs/guides/sharding.md)"
                                 : ": this rank has no batch, and marks nothing; ask for no gradients after "
                                   "begin_step(false)"));
            }
        });
    }

    /// Ends a guard of `no_sync()`. After the last one, or if an exception ended the micro-batch, incomplete marks are
    /// reset for the next micro-batch.
    void end_no_sync(bool unwinds) noexcept {
        const bool last = (unsynchronised_ -= one_guard) < one_guard;
        if (!(last || unwinds) || guard_.failed()) return;
        try {
            guard_.run([&] {
                for (const std::size_t i : planned_.order()) {
                    const std::uint32_t remaining = readiness_.remaining(i);
                    if (remaining == 0 || remaining == readiness_.uses(i)) continue;
                    readiness_.rearm(i);
                    if (unwinds || !contribution_.has_batch) continue;
                    check_gradient(i);
                    readiness_.used()[i] = 1;
                    if (adds_up()) add_up(i, "no_sync");
                }
                if (last) home_.sums().end_micro_batch();
            });
        } catch (...) {  // every later call reports the failure
        }
    }

    void settle_unready(bool only_names = false) {
        List<std::size_t> missing;
        for (const std::size_t i : planned_.order()) {
            const std::uint32_t remaining = readiness_.remaining(i);
            if (remaining == 0) continue;
            const bool partly_marked = remaining != readiness_.uses(i);
            if (!only_names && readiness_.used()[i] &&
                !partly_marked) {  // its gradient comes from earlier micro-batches
                if (home_.sums().holds(i)) home_.deposit(i, {});
                else if (home_.row(i).copied) home_.deposit(i);
            } else if (options_.unused == UnusedParameters::error) {
                missing.push_back(i);
                continue;
            } else if (partly_marked) {
                check_gradient(i);
                readiness_.used()[i] = 1;
                if (home_.row(i).deposited) home_.deposit(i);
            } else {
                if (home_.pooled()) obtain(readiness_.bucket_of(i), "finish");
                home_.keep(i);
                home_.clear(i);
            }
            readiness_.settle(i);
        }
        if (!missing.empty())
            fail_at(missing[0], "finish",
                    not_ready(missing, planned_.order().size(), planned_.parameters(), readiness_),
                    Errc::gradient_not_ready);
    }

    // ------------------------------------------------------------------------------------------- what may be wrong

    /// Fails if a gradient of bucket b, which was not launched, has changed since its mark.
    [[gnu::cold]] void check_written(std::size_t b, const char* operation) {
        for (const std::size_t i : planned_.plan().bucket(b))
            if (written_.since_mark(i, home_.gradient(i)))
                fail_at(i, operation,
                        text("the gradient of '", name(i),
                             "' was written after its mark; mark it when its last contribution is in (a parameter that "
                             "several layers use: register it once, with as many `uses`), and let no other thread "
                             "write it before finish() returns"));
    }
    /// Fails if gradient i is no longer where it was registered.
    void check_place(std::size_t i, const char* operation) {
        const ParameterView& p = planned_[i];
        if (!tracks_ || p.look == nullptr || !p.requires_grad) return;
        const BufferView now = p.look(p.owner);
        if (now == p.gradient) return;
        const bool moved = now.count == p.gradient.count;
        fail_at(i, operation,
                text("the gradient of '", p.name, "' ",
                     moved ? "moved" : text("has ", now.count, " elements now, and had ", p.gradient.count),
                     "; call rebind_gradient() between steps when its memory has moved, and make a new Reducer if its "
                     "size changes"));
    }
    /// The checks of a mark that options or parameters ask for.
    void check_gradient(std::size_t i) {
        check_place(i, "mark_ready");
        if (options_.non_finite == NonFinite::pass || kernel::all_finite(home_.gradient(i))) return;
        if (options_.non_finite == NonFinite::error)
            fail_at(i, "mark_ready",
                    text("the gradient of '", name(i),
                         "' has an element that is infinite or NaN; lower the learning rate or the loss scale, or "
                         "skip such steps (NonFinite::skip)"),
                    Errc::non_finite);
        skips_.store(true, std::memory_order_relaxed);
    }

    /// Fails because of gradient i.
    [[noreturn, gnu::cold, gnu::noinline]] void fail_at(std::size_t i, const char* operation, const std::string& what,
                                                        Errc code = Errc::invalid_argument) {
        guard_.fail(code, operation, what, name(i), readiness_.bucket_of(i));
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
        const std::string what = marked_too_often(planned_[i], readiness_.bucket_of(i), has_ended());
        if (!planned_[i].requires_grad) guard_.refuse({.operation = "mark_ready", .parameter = name(i)}, what);
        fail_at(i, "mark_ready", what, Errc::gradient_marked_twice);
    }
    static constexpr const char* in_finish =
        "another thread is in finish(); end the backward on all threads, then call finish() on one";

    Guard<B>& guard_;
    const ReducerOptions& options_;
    GradientHome<B>& home_;
    const PlannedParameters<B>& planned_ = home_.planned();
    Readiness& readiness_;
    InFlight<B>& in_flight_;
    OwnContribution& contribution_ = in_flight_.contribution();
    AnyOverlap& overlap_;
    const DeferredGather<B>& gathers_;  ///< of averages, with OverlapForward

    const bool tracks_ = options_.gradients == GradientStorage::borrowed && any_tracked(planned_.parameters());
    const bool checks_gradients_ = tracks_ || options_.non_finite != NonFinite::pass;
    std::atomic<bool> skips_{false};  ///< a gradient of this rank has an element that is not finite
    /// `fresh` or `averaged` until the backward is over, then `ended` or `closed`.
    std::atomic<Phase> base_{Phase::fresh};
    ReadyOrder<B> order_;
    WrittenGradients written_;
    /// By parameter: was the memory of its gradient asked for in this backward? Only if gradients are pooled.
    List<std::uint8_t> asked_for_ = List<std::uint8_t>(home_.pooled() ? planned_.size() : 0);
    bool rest_is_marked_ = false;  ///< by `mark_ready()`, in this step
    bool watched_ = false;         ///< marks are recorded, observed or checked

    static constexpr unsigned without_batch = 1, finishing = 2, one_guard = 4;
    std::atomic<unsigned> unsynchronised_{0};  ///< why marks synchronise nothing: these flags, and one_guard per guard
    std::atomic<std::size_t> unpolled_bytes_{0};  ///< of gradients marked since the policy was last told
};

}  // namespace gradsync::inline v0_2::detail
