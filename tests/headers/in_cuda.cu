// SPDX-License-Identifier: BSL-1.0
// Every public header in a .cu file, and the templates that a trainer instantiates. It is only compiled; see CMakeLists.txt.
#include "optional.hpp"

#include "all.hpp"

namespace gs = gradsync;

template <class Backend>
void train(Backend comm, gs::BufferView value, gs::BufferView gradient) {
    gs::Reducer sync(comm, {gs::parameter("w", value, gradient)}, gs::SizeCappedBuckets{100}, gs::OverlapBackward{});
    sync.broadcast_parameters();
    sync.mark_ready(0);
    sync.finish();
    auto work = comm.all_reduce(gradient, gs::ReduceOp::sum);
    work = comm.all_reduce(gradient, gs::ReduceOp::sum);
    work.wait();
}

template void train(gs::ThreadBackend, gs::BufferView, gs::BufferView);
template void train(gs::NcclBackend, gs::BufferView, gs::BufferView);
