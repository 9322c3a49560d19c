// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <vector>

#include "observer.hpp"

namespace gradsync::inline v0_2 {

/// Keeps the last events of one rank and their times. An event costs one clock read and a write of 32 bytes. A timeline
/// allocates nothing during training. `write_trace` writes it to a file for a trace viewer; `summarise` makes a table.
///
///     gs::Timeline timeline;
///     gs::Reducer<...> sync(comm, parameters, {.observer = &timeline});
///     for (...) {
///         { auto scope = timeline.scope("backward"); model.backward(...); }
///         sync.finish();
///     }
///     gs::write_trace(comm, timeline, "trace.json");
///
/// A timeline belongs to one rank. Adding events and scopes is thread-safe. Call the other functions from one thread,
/// while no events come.
class Timeline final : public Observer {
public:
    /// Keeps the last `events` events, rounded up to a power of two. Fewer threads than that may report at the same
    /// time. A step has:
    ///
    /// - one event per parameter, and two more if a gradient of 16 KiB or more is copied into its bucket;
    /// - four per bucket, and four more if it is gathered;
    /// - two each time a hook advances collectives;
    /// - one per scope.
    explicit Timeline(std::size_t events = std::size_t{1} << 16)
        : records_(std::bit_ceil(events < 2 ? std::size_t{2} : events)) {}

    /// An activity of the trainer, from construction to destruction, on the steady clock. Recorded when it ends. `name`
    /// must outlive the timeline, as a literal does.
    class [[nodiscard]] Scope {
    public:
        /// `timeline` may be null.
        Scope(Timeline* timeline, const char* name) : timeline_(timeline), name_(name) {
            if (timeline_ != nullptr) begin_ = std::chrono::steady_clock::now();
        }
        Scope& operator=(Scope&&) = delete;
        ~Scope() {
            if (timeline_ != nullptr) timeline_->add({std::chrono::steady_clock::now(), begin_, name_, 0, Kind::scope});
        }

    private:
        Timeline* timeline_;
        const char* name_;
        Time begin_{};
    };
    Scope scope(const char* name) { return Scope(this, name); }  ///< Records until the result is destroyed.
    /// Adds a scope with times of another clock, such as that of a simulated cluster (`backend_now`).
    void add_scope(const char* name, Time begin, Time end) noexcept { add({end, begin, name, 0, Kind::scope}); }

    void plan(const BucketPlan& plan, std::span<const std::size_t> bytes,
              std::span<const std::string_view> names) override {
        if (!(plan_ == plan)) planned_ = count_.load(std::memory_order_relaxed);
        plan_ = plan;
        bucket_bytes_.assign(bytes.begin(), bytes.end());
        parameter_names_.assign(names.begin(), names.end());
    }
    void ready(std::size_t parameter, Time at) noexcept override { note(Kind::ready, {}, parameter, at); }
    void begin(Activity activity, std::size_t index, Time at) noexcept override {
        note(Kind::begin, activity, index, at);
    }
    void end(Activity activity, std::size_t index, Time at) noexcept override { note(Kind::end, activity, index, at); }

    /// An activity or a scope, with its beginning and end.
    struct Span {
        static constexpr std::uint32_t no_index = 0xffffffff;  ///< Observer::no_index, cut to 32 bits like every index

        const char* name;  ///< of a scope; null for an activity
        Activity activity;
        std::uint32_t index;
        Time begin, end;
        bool finished = true;      ///< false: still running at the last event, whose time is `end`
        bool of_this_plan = true;  ///< it began under the current plan
    };
    struct Mark {
        std::uint32_t parameter;
        Time at;
    };

    /// All spans that have ended and are kept, ordered by beginning; of equal beginnings longer ones first. With
    /// `unfinished`, also those that have not ended: after a failure they show what the rank was doing.
    std::vector<Span> spans(bool unfinished = false) const {
        struct Open {
            Record record;
            std::size_t number;
        };
        std::vector<Span> spans;
        std::vector<Open> open;
        Time last{};
        for_each_record([&](const Record& r, std::size_t number) {
            last = std::max(last, r.at);
            if (r.kind == Kind::begin) open.push_back({r, number});
            if (r.kind == Kind::scope) spans.push_back({r.name, {}, Span::no_index, r.begin, r.at});
            if (r.kind != Kind::end) return;
            for (std::size_t k = open.size(); k-- > 0;)
                if (open[k].record.index == r.index && open[k].record.activity == r.activity) {
                    spans.push_back(
                        {nullptr, r.activity, r.index, open[k].record.at, r.at, true, open[k].number >= planned_});
                    open.erase(open.begin() + static_cast<std::ptrdiff_t>(k));
                    break;
                }  // otherwise its beginning was overwritten
        });
        if (unfinished)
            for (const Open& o : open)
                spans.push_back({nullptr, o.record.activity, o.record.index, o.record.at, std::max(last, o.record.at),
                                 false, o.number >= planned_});
        std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
            return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
        });
        return spans;
    }
    /// The times at which gradients became ready, in order.
    std::vector<Mark> marks() const {
        std::vector<Mark> marks;
        for_each_record([&](const Record& r, std::size_t) {
            if (r.kind == Kind::ready) marks.push_back({r.index, r.at});
        });
        std::stable_sort(marks.begin(), marks.end(), [](const Mark& a, const Mark& b) { return a.at < b.at; });
        return marks;
    }

    /// The current plan, with its bytes by bucket and names by parameter.
    const BucketPlan& plan() const noexcept { return plan_; }
    std::span<const std::size_t> bucket_bytes() const noexcept { return bucket_bytes_; }        ///< by bucket
    std::span<const std::string> parameter_names() const noexcept { return parameter_names_; }  ///< by parameter

    /// The number of events that later ones have overwritten.
    std::size_t dropped() const noexcept {
        const std::size_t n = count_.load(std::memory_order_relaxed);
        return n > records_.size() ? n - records_.size() : 0;
    }
    /// Forgets all events.
    void clear() noexcept {
        count_.store(0, std::memory_order_relaxed);
        planned_ = 0;
    }

private:
    enum class Kind : std::uint8_t { ready, begin, end, scope };
    struct Record {
        Time at;
        Time begin;  ///< beginning of a scope
        const char* name = nullptr;
        std::uint32_t index = 0;
        Kind kind = Kind::ready;
        Activity activity{};
    };
    static_assert(sizeof(Record) <= 32);

    void note(Kind kind, Activity activity, std::size_t index, Time at) noexcept {
        add({at, {}, nullptr, static_cast<std::uint32_t>(index), kind, activity});
    }
    void add(const Record& record) noexcept {
        records_[count_.fetch_add(1, std::memory_order_relaxed) & (records_.size() - 1)] = record;
    }
    template <class Use>
    void for_each_record(Use&& use) const {
        const std::size_t n = count_.load(std::memory_order_relaxed);
        for (std::size_t k = dropped(); k < n; ++k) use(records_[k & (records_.size() - 1)], k);
    }

    std::vector<Record> records_;  ///< a ring
    std::atomic<std::size_t> count_{0};
    BucketPlan plan_;
    std::size_t planned_ = 0;  ///< number of the first event under this plan
    std::vector<std::size_t> bucket_bytes_;
    std::vector<std::string> parameter_names_;
};

}  // namespace gradsync::inline v0_2
