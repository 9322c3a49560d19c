// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../backend/tcp.hpp"
#include "agreement.hpp"
#include "kept_memory.hpp"

namespace gradsync::inline v0_2::elastic {

/// A rank sends this to the others when they have met. Plain bytes.
struct Entry {
    Row row = {};
    std::uint64_t bytes = 0, layout = 0;  ///< of the state that all ranks have
    std::uint32_t begun = 0;              ///< has the job? As rank 0 sees it.
};

/// `place`: has the peer, if one is to blame.
[[noreturn]] void refuse_state(const TcpBackend& comm, Errc errc, const bootstrap::ErrorPlace& place,
                               const auto&... parts) {
    bootstrap::raise(errc, {.operation = "restore", .rank = comm.rank(), .peer = place.peer}, "restore: ", parts...);
}

/// Adds views to the pieces of a state, and their bytes and a hash of their sizes to this rank's entry.
[[gnu::cold]] inline List<Piece> pieces_of(const TcpBackend& comm, std::span<const BufferView> state, Entry& own) {
    List<Piece> pieces;
    own.layout = detail::larger<std::uint64_t>(own.layout, 1);
    for (const BufferView& view : state) {
        if (view.space != MemorySpace::host)
            refuse_state(comm, Errc::invalid_argument, {}, "the state is memory of the host; copy what is on a device");
        const std::size_t size = view.bytes();
        if (size != 0) pieces.push_back({static_cast<std::byte*>(view.data), size, own.bytes});
        own.layout = detail::fnv1a(&size, sizeof size, own.layout);
        own.bytes += size;
    }
    return pieces;
}

/// Returns what all ranks have. Throws Error(parameter_mismatch) if their states are not alike. Collective.
[[gnu::cold]] inline List<Entry> exchange_entries(TcpBackend& comm, const Entry& own) {
    List<Entry> all = detail::gather_value(comm, own);
    for (std::size_t r = 0; r < all.size(); ++r)
        if (all[r].bytes != all[0].bytes || all[r].layout != all[0].layout)
            refuse_state(comm, Errc::parameter_mismatch, {.peer = static_cast<int>(r)}, "rank ", r, " has ",
                         all[r].bytes, " bytes of state, rank 0 ", all[0].bytes,
                         ", or in other pieces; pass the same on all ranks, in the same order");
    return all;
}

/// Calls `use(first, view)` with consecutive parts of some bytes: each is small enough to travel within a time limit.
template <class Use>
void in_chunks(std::byte* data, std::size_t bytes, Use&& use) {
    constexpr std::size_t chunk = std::size_t{4} << 20;
    for (std::size_t done = 0; done < bytes; done += chunk)
        use(done, BufferView(reinterpret_cast<std::uint8_t*>(data + done), detail::smaller(chunk, bytes - done)));
}

}  // namespace gradsync::inline v0_2::elastic
