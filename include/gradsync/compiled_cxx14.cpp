// SPDX-License-Identifier: BSL-1.0
// The source of gradsync::cxx14. It links what gradsync::compiled holds.
#ifndef GRADSYNC_COMPILED
#define GRADSYNC_COMPILED
#endif
#include "backend/tcp.hpp"
#include "cxx14.hpp"
#include "gradsync.hpp"

namespace gradsync::inline v0_2::cxx14 {

namespace {

/// Texts of the library's errors that recommend what this interface lacks, and what to do here instead.
constexpr std::string_view remedies[][2] = {
    {", or let gradients live in the buckets (GradientStorage::in_buckets)", ""},
    {"an empty ParameterView", "an empty Parameter"},
    {" in its ParameterView or parameter_traits", ""},
    {" (if it is empty on purpose: set may_be_empty)", ""},
    {", or set may_be_empty if it is empty on purpose", ""},
    {"Averaging::sum", "Options::sum"},
    {", with `uses` of 2", ""},
    {", with as many `uses`", ""},
    {" put micro-batches before the last under no_sync(), or set its `uses` if it is used more often",
     " and mark each gradient once, when its last contribution is in, in the last micro-batch"},
    {", freeze it, or choose UnusedParameters::find_unused",
     "; set the gradient of one that the step does not use to 0"},
    {"; for one bucket per parameter use PerParameter", ""},
    {" (if they differ on purpose: ReducerOptions::compare_weights_every = gs::never)", ""},
};

[[noreturn]] void translate(const gradsync::Error& e) {
    std::string what = e.what();
    for (const auto& [words, here] : remedies)
        if (const std::size_t at = what.find(words); at != std::string::npos) what.replace(at, words.size(), here);
    throw Error(e.errc(), what.c_str(), e.context().rank, e.context().peer);
}
template <class F>
decltype(auto) translating(F&& f) {
    try {
        return f();
    } catch (const gradsync::Error& e) {
        translate(e);
    }
}

std::chrono::nanoseconds limit_of(double seconds) {
    if (!(seconds > 0)) return {};  // is refused
    return std::chrono::nanoseconds(static_cast<std::int64_t>(detail::smaller(seconds, 1e9) * 1e9));
}

}  // namespace

struct Communicator::State {
    TcpBackend backend;
};

Communicator Communicator::from_environment(double timeout_seconds) {
    return translating([&] {
        return Communicator(
            std::make_shared<State>(State{TcpBackend::from_environment({.timeout = limit_of(timeout_seconds)})}));
    });
}
int Communicator::rank() const { return state_->backend.rank(); }
int Communicator::size() const { return state_->backend.size(); }
void Communicator::set_timeout(double seconds) {
    translating([&] { state_->backend.set_timeout(limit_of(seconds)); });
}
void Communicator::fail(const char* reason) noexcept {
    state_->backend.fail(reason != nullptr ? reason : "it gave no reason");
}
void Communicator::average(void* data, std::size_t count, DType type) {
    translating([&] { gradsync::average(state_->backend, BufferView(data, count, type)); });
}
void Communicator::sum(void* data, std::size_t count, DType type) {
    translating([&] { gradsync::sum(state_->backend, BufferView(data, count, type)); });
}
void Communicator::broadcast(void* data, std::size_t count, DType type, int root) {
    translating([&] { state_->backend.broadcast(BufferView(data, count, type), root).wait(); });
}

struct Reducer::State {
    gradsync::Reducer<TcpBackend, SizeCappedBuckets, AnyOverlap> sync;
};

Reducer::Reducer(const Communicator& comm, const Parameter* parameters, std::size_t count, const Options& options) {
    translating([&] {
        if (parameters == nullptr && count != 0)
            detail::refuse({"Reducer", comm.rank()}, "the array of ", count,
                           " parameters is a null pointer; pass its address");
        std::vector<ParameterView> views;
        for (const Parameter& p : ListView(parameters, count)) {
            ParameterView& view = views.emplace_back();
            view.name = p.name == nullptr ? "" : p.name;
            if (p.value != nullptr) view.value = BufferView(p.value, p.count, p.type);
            view.gradient = BufferView(p.gradient, p.count, p.type);
        }
        const AnyOverlap overlap = options.overlap ? AnyOverlap(OverlapBackward()) : AnyOverlap(NoOverlap());
        state_.reset(new State{{comm.state_->backend, views,
                                ReducerOptions{.averaging = options.sum ? Averaging::sum : Averaging::mean},
                                SizeCappedBuckets(options.bucket_bytes, options.first_bucket_bytes), overlap}});
    });
}
void Reducer::broadcast_parameters(int root) {
    translating([&] { state_->sync.broadcast_parameters(root); });
}
bool Reducer::begin_step(bool has_batch) {
    return translating([&] { return state_->sync.begin_step(has_batch); });
}
void Reducer::mark_ready(std::size_t i) {
    translating([&] { state_->sync.mark_ready(i); });
}
void Reducer::finish() {
    translating([&] { state_->sync.finish(); });
}
double Reducer::clip_gradients_by_norm(double limit) {
    return translating([&] { return state_->sync.clip_gradients_by_norm(limit); });
}

}  // namespace gradsync::inline v0_2::cxx14
