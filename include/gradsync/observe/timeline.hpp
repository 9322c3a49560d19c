#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../core/bucket_plan.hpp"
#include "../core/clock.hpp"
#include "observer.hpp"

namespace gradsync::inline v0 {

/// Keeps what happened on one rank, and when: the last events of them, so many as it has room for. What it costs is a clock's reading and a
/// write of 32 bytes an event; it allocates nothing once the training runs. `write_trace` makes a file of it for people to look at,
/// `summarise` a table.
///
///     gs::Timeline timeline;
///     gs::Reducer<...> sync(comm, parameters, {.observer = &timeline});
///     for (...) {
///         { auto scope = timeline.scope("backward"); model.backward(...); }
///         sync.finish();
///     }
///     gs::write_trace(comm, timeline, "trace.json");
///
/// One rank's. Events and scopes come from any thread; the rest is for one thread while none come.
class Timeline final : public Observer {
public:
    /// A step has about five events a bucket and one a parameter.
    explicit Timeline(std::size_t events = std::size_t{1} << 16) : records_(std::bit_ceil(events < 2 ? std::size_t{2} : events)) {}

    /// Something of the trainer's own. `name` is a literal, or lives as long as the timeline. Scopes of one thread end in the reverse
    /// order.
    class [[nodiscard]] Scope {
    public:
        Scope(Timeline* timeline, const char* name) : timeline_(timeline), name_(name) {
            if (timeline_ != nullptr) timeline_->add({std::chrono::steady_clock::now(), name_, 0, Kind::begin});
        }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;
        ~Scope() {
            if (timeline_ != nullptr) timeline_->add({std::chrono::steady_clock::now(), name_, 0, Kind::end});
        }

    private:
        Timeline* timeline_;
        const char* name_;
    };
    Scope scope(const char* name) { return Scope(this, name); }

    void plan(const BucketPlan& plan, std::span<const std::size_t> bytes, std::span<const std::string_view> names) override {
        plan_ = plan;
        bucket_bytes_.assign(bytes.begin(), bytes.end());
        parameter_names_.assign(names.begin(), names.end());
    }
    void ready(std::size_t parameter, Time at) noexcept override { add({at, nullptr, static_cast<std::uint32_t>(parameter), Kind::ready}); }
    void begin(Activity activity, std::size_t index, Time at) noexcept override {
        add({at, nullptr, static_cast<std::uint32_t>(index), Kind::begin, activity});
    }
    void end(Activity activity, std::size_t index, Time at) noexcept override {
        add({at, nullptr, static_cast<std::uint32_t>(index), Kind::end, activity});
    }

    /// Something that lasted.
    struct Span {
        const char* name;      ///< of a scope; null for an activity
        Activity activity;
        std::uint32_t index;   ///< as Observer says, cut to 32 bits
        Time begin, end;
    };
    static constexpr std::uint32_t no_index = 0xffffffff;
    struct Mark {
        std::uint32_t parameter;
        Time at;
    };

    /// All that is kept and has ended, by beginnings.
    std::vector<Span> spans() const {
        std::vector<Span> spans;
        std::vector<Record> open;
        for_each_record([&](const Record& r) {
            if (r.kind == Kind::begin) open.push_back(r);
            if (r.kind != Kind::end) return;
            for (std::size_t k = open.size(); k-- > 0;)
                if (open[k].name == r.name && open[k].index == r.index && open[k].activity == r.activity) {
                    spans.push_back({r.name, r.activity, r.index, open[k].at, r.at});
                    open.erase(open.begin() + static_cast<std::ptrdiff_t>(k));
                    break;
                }  // its beginning is not kept any more
        });
        std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
        return spans;
    }
    /// When gradients became ready.
    std::vector<Mark> marks() const {
        std::vector<Mark> marks;
        for_each_record([&](const Record& r) {
            if (r.kind == Kind::ready) marks.push_back({r.index, r.at});
        });
        std::stable_sort(marks.begin(), marks.end(), [](const Mark& a, const Mark& b) { return a.at < b.at; });
        return marks;
    }

    /// As of the present plan.
    const BucketPlan& plan() const noexcept { return plan_; }
    std::span<const std::size_t> bucket_bytes() const noexcept { return bucket_bytes_; }
    std::span<const std::string> parameter_names() const noexcept { return parameter_names_; }

    /// Events that had to give way to later ones.
    std::size_t dropped() const noexcept {
        const std::size_t n = count_.load(std::memory_order_relaxed);
        return n > records_.size() ? n - records_.size() : 0;
    }
    void clear() noexcept { count_.store(0, std::memory_order_relaxed); }

private:
    enum class Kind : std::uint8_t { ready, begin, end };
    struct Record {
        Time at;
        const char* name = nullptr;
        std::uint32_t index = 0;
        Kind kind = Kind::ready;
        Activity activity{};
    };

    void add(const Record& record) noexcept {
        records_[count_.fetch_add(1, std::memory_order_relaxed) & (records_.size() - 1)] = record;
    }
    template <class Use>
    void for_each_record(Use&& use) const {
        const std::size_t n = count_.load(std::memory_order_relaxed);
        for (std::size_t k = dropped(); k < n; ++k) use(records_[k & (records_.size() - 1)]);
    }

    std::vector<Record> records_;  ///< a ring
    std::atomic<std::size_t> count_{0};
    BucketPlan plan_;
    std::vector<std::size_t> bucket_bytes_;
    std::vector<std::string> parameter_names_;
};

}  // namespace gradsync::inline v0
