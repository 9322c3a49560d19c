// SPDX-License-Identifier: BSL-1.0
// The device passes, on fake streams: the host's kernels do the work.
#include <gradsync/cuda/passes.hpp>

#include <cstring>

#include <gradsync/kernel/convert.hpp>
#include <gradsync/kernel/elementwise.hpp>

#include "fake.hpp"

namespace gradsync::inline v0_2::cuda {

namespace {

BufferView on_host(BufferView view) { return {view.data, view.count, view.dtype, MemorySpace::host}; }
ConstBufferView on_host(ConstBufferView view) { return {view.data, view.count, view.dtype, MemorySpace::host}; }

}  // namespace

void convert(ConstBufferView from, BufferView to, cudaStream_t stream) {
    gradsync_fake::enqueue(stream, [=] { kernel::convert(from.data, from.dtype, to.data, to.dtype, to.count); });
}
void add(BufferView to, ConstBufferView from, cudaStream_t stream) {
    gradsync_fake::enqueue(stream, [=] { kernel::add(on_host(to), on_host(from)); });
}
void scale(BufferView buffer, double factor, cudaStream_t stream) {
    gradsync_fake::enqueue(stream, [=] { kernel::scale(on_host(buffer), factor); });
}
void scale_by(ConstBufferView from, BufferView to, const double* factor, cudaStream_t stream) {
    gradsync_fake::enqueue(stream, [=] {
        std::memmove(to.data, from.data, to.bytes());
        if (*factor == 0) std::memset(to.data, 0, to.bytes());
        else kernel::scale(on_host(to), *factor);
    });
}
void clamp(BufferView buffer, double limit, cudaStream_t stream) {
    gradsync_fake::enqueue(stream, [=] { kernel::clamp(on_host(buffer), limit); });
}
void sums_of_squares(const ConstBufferView* blocks, std::size_t count, double* sums, cudaStream_t stream) {
    gradsync_fake::enqueue(stream, [=] {
        for (std::size_t i = 0; i < count; ++i)
            sums[i] = kernel::sum_of_squares({const_cast<void*>(blocks[i].data), blocks[i].count, blocks[i].dtype, MemorySpace::host});
    });
}
void mean_factor(MeanFactor* cell, double scale, cudaStream_t stream) {
    gradsync_fake::enqueue(stream, [=] {
        cell->factor = cell->weight == 0 ? 0 : scale / cell->weight;
        cell->factor32 = static_cast<float>(cell->factor);
    });
}

}  // namespace gradsync::inline v0_2::cuda
