// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../collective/shared_memory/segment.hpp"

namespace gradsync::inline v0_2::elastic {

/// Bytes of a state, wherever they are. At least one, as memcpy takes no null pointer.
struct Piece {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::size_t first = 0;  ///< where it begins, among the bytes of all pieces
};

/// Returns those of the bytes of `pieces`, side by side, that begin at `first`.
[[gnu::cold]] inline List<Piece> part_of(const List<Piece>& pieces, std::size_t first, std::size_t bytes) {
    List<Piece> part;
    std::size_t done = 0;
    for (const Piece& piece : pieces) {
        const std::size_t skipped = detail::smaller(first, piece.bytes);
        const std::size_t taken = detail::smaller(piece.bytes - skipped, bytes - done);
        if (taken != 0) part.push_back({piece.data + skipped, taken, done});
        first -= skipped;
        done += taken;
    }
    return part;
}

/// Memory for two copies of a state, each with its step. While one is written, the other stays: a process may be killed
/// at any instruction. Another process reads what is there when the writer has ended, or waits. Not thread-safe.
class KeptMemory {
public:
    KeptMemory() = default;
    /// Makes memory for states of `bytes` bytes. `layout`: a hash of what they mean. `sharers`: processes of this
    /// machine that make as much at the same time. Throws std::system_error if there is not enough.
    [[gnu::cold]] static KeptMemory make(std::size_t bytes, std::uint64_t layout, std::size_t sharers = 1) {
        // The system would rather kill a process than refuse.
        if (const std::size_t left = available() / sharers; line + 2 * room(bytes) > left)
            throw std::system_error(std::make_error_code(std::errc::not_enough_memory),
                                    detail::text("keeping two states of ", bytes, " bytes needs more than the ", left,
                                                 " bytes of memory that are left"));
        shared_memory::Segment segment = shared_memory::Segment::create(line + 2 * room(bytes));
        segment.reserve();
        new (segment.data()) Header{.bytes = bytes, .layout = layout};
        return KeptMemory(std::move(segment));
    }
    /// Throws std::system_error if the memory cannot be reached.
    [[gnu::cold]] static KeptMemory open(const shared_memory::Segment::IpcHandle& handle) {
        return KeptMemory(shared_memory::Segment::open(handle));
    }

    /// The same, so that the memory stays when its maker ends. For a launcher.
    [[gnu::cold]] static KeptMemory take_over(const shared_memory::Segment::IpcHandle& handle) {
        return KeptMemory(shared_memory::Segment::take_over(handle));
    }

    std::size_t bytes() const noexcept { return bytes_; }      ///< Returns the bytes of a state.
    std::uint64_t layout() const noexcept { return layout_; }  ///< Returns what was given to `make`.
    const shared_memory::Segment::IpcHandle& handle() const noexcept { return segment_.ipc_handle(); }
    /// Is this memory for states of `bytes` bytes that mean `layout`?
    bool is_for(std::size_t bytes, std::uint64_t layout) const noexcept { return bytes_ == bytes && layout_ == layout; }

    /// The step of slot 0 or 1; 0: it has no state.
    std::uint64_t step(int slot) const noexcept { return header().steps[slot].load(std::memory_order_acquire); }
    std::uint64_t newest() const noexcept { return detail::larger(step(0), step(1)); }
    /// Which slot has the state of this step; -1: none.
    int slot_of(std::uint64_t step) const noexcept {
        return step == this->step(0) ? 0 : step == this->step(1) ? 1 : -1;
    }

    /// Writes a state over the older one. `step` is not 0.
    void write(std::uint64_t step, const List<Piece>& pieces) noexcept {
        const int slot = this->step(0) <= this->step(1) ? 0 : 1;
        forget(slot);
        for (const Piece& piece : pieces) std::memcpy(state(slot) + piece.first, piece.data, piece.bytes);
        header().steps[slot].store(step, std::memory_order_release);
    }
    void read(int slot, const List<Piece>& pieces) const noexcept {
        for (const Piece& piece : pieces) std::memcpy(piece.data, state(slot) + piece.first, piece.bytes);
    }
    /// A hash by which ranks compare their states; 0: there is none. It belongs to neither slot.
    void set_digest(std::uint64_t digest) noexcept { header().digest.store(digest, std::memory_order_relaxed); }
    std::uint64_t digest() const noexcept { return header().digest.load(std::memory_order_relaxed); }

    /// No write of the state comes before this.
    void forget(int slot) noexcept {
        header().steps[slot].store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }

private:
    struct Header {
        std::uint64_t bytes = 0, layout = 0;
        std::atomic<std::uint64_t> steps[2] = {};
        std::atomic<std::uint64_t> digest = 0;
    };
    static_assert(sizeof(Header) <= 64);
    static constexpr std::size_t line = 64;  ///< bytes of a cache line; the header takes one
    static constexpr std::size_t room(std::size_t bytes) noexcept { return detail::round_up(bytes, line); }

    /// Returns how much memory this process may still take: of the machine, and of its control group (version 2).
    [[gnu::cold]] static std::size_t available() {
        constexpr unsigned long long unlimited = ~0ull;
        const auto number_in = [](const char* file, std::string_view before) {
            unsigned long long number = unlimited;
            std::FILE* const lines = std::fopen(file, "re");
            char text[128];
            while (lines != nullptr && std::fgets(text, sizeof text, lines) != nullptr)
                if (std::string_view(text).starts_with(before)) {
                    char* end = nullptr;
                    const unsigned long long read = std::strtoull(text + before.size(), &end, 10);
                    if (end != text + before.size()) number = read;  // it may say "max"
                    break;
                }
            if (lines != nullptr) std::fclose(lines);
            return number;
        };
        const auto of_machine = number_in("/proc/meminfo", "MemAvailable:");
        const auto limit = number_in("/sys/fs/cgroup/memory.max", ""),
                   used = number_in("/sys/fs/cgroup/memory.current", "");
        // Pages of files that nobody uses are counted, and given up first.
        const auto files = number_in("/sys/fs/cgroup/memory.stat", "inactive_file ");
        const auto taken = used == unlimited || files == unlimited || files > used ? used : used - files;
        const auto of_group = limit == unlimited ? limit : taken > limit ? 0 : limit - taken;
        return detail::smaller(of_machine < (unlimited >> 10) ? of_machine << 10 : unlimited, of_group);
    }

    /// Another process may overwrite the header later: this is what counts. Throws std::system_error if the memory is
    /// for something else.
    [[gnu::cold]] explicit KeptMemory(shared_memory::Segment segment) : segment_(std::move(segment)) {
        if (segment_.bytes() >= line) {
            bytes_ = header().bytes;
            layout_ = header().layout;
        }
        if (bytes_ > segment_.bytes() || segment_.bytes() != line + 2 * room(bytes_))
            throw std::system_error(std::make_error_code(std::errc::invalid_argument),
                                    "this memory is not for a state");
    }

    Header& header() const noexcept { return *reinterpret_cast<Header*>(segment_.data()); }
    std::byte* state(int slot) const noexcept {
        return segment_.data() + line + static_cast<std::size_t>(slot) * room(bytes_);
    }

    shared_memory::Segment segment_;
    std::size_t bytes_ = 0;
    std::uint64_t layout_ = 0;
};

}  // namespace gradsync::inline v0_2::elastic
