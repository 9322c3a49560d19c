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

template <class F>
decltype(auto) translating(F&& f) {
    try {
        return f();
    } catch (const gradsync::Error& e) {
        throw Error(e.errc(), e.what(), e.context().rank, e.context().peer);
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
    return translating(
        [&] { return Communicator(std::make_shared<State>(State{TcpBackend::from_environment({.timeout = limit_of(timeout_seconds)})})); });
}
int Communicator::rank() const { return state_->backend.rank(); }
int Communicator::size() const { return state_->backend.size(); }
void Communicator::set_timeout(double seconds) {
    translating([&] { state_->backend.set_timeout(limit_of(seconds)); });
}
void Communicator::fail(const char* reason) noexcept { state_->backend.fail(reason); }
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
        std::vector<ParameterView> views;
        for (const Parameter& p : ListView(parameters, count)) {
            ParameterView& view = views.emplace_back();
            view.name = p.name == nullptr ? "" : p.name;
            if (p.value != nullptr) view.value = BufferView(p.value, p.count, p.type);
            view.gradient = BufferView(p.gradient, p.count, p.type);
        }
        const AnyOverlap overlap = options.overlap ? AnyOverlap(OverlapBackward()) : AnyOverlap(NoOverlap());
        state_.reset(new State{{comm.state_->backend, views, ReducerOptions{.averaging = options.sum ? Averaging::sum : Averaging::mean},
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
