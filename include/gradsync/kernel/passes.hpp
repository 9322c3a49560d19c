// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/backend.hpp"
#include "elementwise.hpp"
#include "host_buffer.hpp"

/// @file
/// The passes of a Reducer, or of sharded training, over a backend's memory. Host memory uses the host's kernels, which
/// are synchronous. Other memory uses the backend's own passes (BackendAbilities::device_passes and
/// BackendAbilities::wait_on).

namespace gradsync::inline v0_2::detail {

struct HostPasses {
    static void copy(ConstBufferView from, BufferView to) { kernel::copy(from, to); }
    static void add(BufferView to, ConstBufferView from) { kernel::add(to, from); }
    static void scale(BufferView buffer, double factor) { kernel::scale(buffer, factor); }
    static void clamp(BufferView buffer, double limit) { kernel::clamp(buffer, limit); }

    static void clear(BufferView buffer) noexcept {
        if (buffer.bytes() != 0) std::memset(buffer.data, 0, buffer.bytes());
    }
    /// Copies from the backend's memory to the host's; `write` copies the other way.
    /// The copy is complete when they return.
    static void read(ConstBufferView from, void* to) noexcept {
        if (from.bytes() != 0) std::memcpy(to, from.data, from.bytes());
    }
    static void write(const void* from, BufferView to) noexcept {
        if (to.bytes() != 0) std::memcpy(to.data, from, to.bytes());
    }

    /// Zeroed memory that no collective reads.
    static kernel::HostBuffer allocate(std::size_t bytes) { return kernel::HostBuffer(bytes); }

    /// Sums of squares of several buffers. A `sum` is valid after `finish()`.
    struct SquareSums {
        static void add(ConstBufferView elements, double& sum) { sum = kernel::sum_of_squares(elements); }
        static void finish() noexcept {}
    };
    static SquareSums square_sums() noexcept { return {}; }
};

template <Backend B>
auto passes_of(B& backend) {
    if constexpr (abilities_of<B>.device_passes) {
        return backend.passes();
    } else {
        static_assert(
            B::memory_space == MemorySpace::host,
            "gradsync: a backend of device memory needs passes(), stream() and host() to be used by a Reducer; see "
            "gradsync/kernel/passes.hpp");
        return HostPasses();
    }
}

template <Backend B>
using PassesOf = decltype(passes_of(std::declval<B&>()));

/// The same ranks as a backend of host memory.
template <Backend B>
auto& host_of(B& backend) noexcept {
    if constexpr (B::memory_space == MemorySpace::host) return backend;
    else return backend.host();
}

template <Backend B>
using HostOf = std::remove_reference_t<decltype(host_of(std::declval<B&>()))>;

/// Copies elements from the backend's memory to the host's, and converts them.
template <Backend B>
void read_as(B& backend, ConstBufferView from, BufferView to) {
    if constexpr (B::memory_space == MemorySpace::host) {
        kernel::copy(from, to);
    } else {
        List<std::byte> raw(from.bytes());
        passes_of(backend).read(from, raw.data());
        kernel::copy(typed_view(raw.data(), from.count, from.dtype), to);
    }
}

/// Makes `other` order its collectives by the compute stream of `backend`, if they have one.
template <Backend B>
void follow_stream(B& other, const B& backend) {
    if constexpr (requires { other.set_stream(backend.stream()); })
        if (other.stream() != backend.stream()) other.set_stream(backend.stream());
}

/// Returns when passes over the result of `work` may be called. Throws as its `wait()` does.
template <Backend B, Work W>
void await(B& backend, W& work) {
    if constexpr (requires { work.wait_on(backend.stream()); }) work.wait_on(backend.stream());
    else work.wait();
}

}  // namespace gradsync::inline v0_2::detail
