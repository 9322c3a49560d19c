#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "segment.hpp"
#include "world.hpp"

#if defined(__linux__)
#include <signal.h>
#include <unistd.h>
#endif

namespace gradsync::inline v0::shared_memory {

/// The world of ranks that are processes of one machine. What they share lies in a segment, with room for what the
/// first communicator shares: one process creates it, every rank then joins.
class ProcessWorld : public World {
public:
    /// `room`: bytes for `memory()`.
    static Segment create(int ranks, std::size_t room) { return Segment::create(room_offset(ranks) + room); }

    /// Makes the calling process rank `rank` of `ranks`.
    static std::shared_ptr<ProcessWorld> join(Segment segment, int rank, int ranks) {
        return std::shared_ptr<ProcessWorld>(new ProcessWorld(std::make_shared<Segment>(std::move(segment)), rank, ranks));
    }

    /// Memory that all ranks see, zeroed, aligned to 64 bytes. It keeps itself alive.
    std::shared_ptr<std::byte> memory() const { return {segment_, segment_->data() + room_offset(ranks_)}; }

    /// What has to be done for this rank by a thread of its own.
    class Chore {
    public:
        /// As much as can be done at once; not if another thread is at it.
        virtual void try_advance() noexcept = 0;

    protected:
        ~Chore() = default;
    };
    void enlist(Chore& chore) {
        std::lock_guard lock(mutex_);
        chores_.push_back(&chore);
    }
    void dismiss(Chore& chore) noexcept {
        std::lock_guard lock(mutex_);
        std::erase(chores_, &chore);
    }
    /// All communicators' chores: a rank may wait in one of them for a rank that waits in another.
    void try_advance() noexcept {
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock) return;
        for (Chore* chore : chores_) chore->try_advance();
    }

    /// False once the process has died; true while it has not joined.
    bool alive(int world_rank) noexcept override {
#if defined(__linux__)
        const std::int64_t process = processes()[world_rank].load(std::memory_order_acquire);
        if (process == 0) return true;
        if (::kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) return false;
        return !is_zombie(process);
#else
        (void)world_rank;
        return true;
#endif
    }

    /// A number for a new region, 1 or more, which nobody else is given.
    std::uint32_t next_region() noexcept { return shared().regions.fetch_add(1, std::memory_order_relaxed) + 1; }

private:
    struct Shared {
        State state;
        std::atomic<std::uint32_t> regions{0};
    };

    ProcessWorld(std::shared_ptr<Segment> segment, int rank, int ranks)
        : World(ranks, reinterpret_cast<Shared*>(segment->data())->state), segment_(std::move(segment)), ranks_(ranks) {
#if defined(__linux__)
        processes()[rank].store(::getpid(), std::memory_order_release);
#else
        (void)rank;
#endif
    }

    static constexpr std::size_t round_up(std::size_t bytes) noexcept { return (bytes + 63) / 64 * 64; }
    static constexpr std::size_t room_offset(int ranks) noexcept {
        return round_up(sizeof(Shared)) + round_up(static_cast<std::size_t>(ranks) * sizeof(std::atomic<std::int64_t>));
    }

    Shared& shared() const noexcept { return *reinterpret_cast<Shared*>(segment_->data()); }
    std::atomic<std::int64_t>* processes() const noexcept {
        return reinterpret_cast<std::atomic<std::int64_t>*>(segment_->data() + round_up(sizeof(Shared)));
    }

    /// A process that has died keeps its number until its parent asks for it.
    static bool is_zombie(std::int64_t process) noexcept {
        char path[48];
        std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(process));
        std::FILE* const file = std::fopen(path, "re");
        if (file == nullptr) return false;
        char text[256] = {};
        const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
        std::fclose(file);
        // "number (name) state ...": the name may hold anything, so the last parenthesis counts.
        std::size_t at = length;
        while (at > 0 && text[at - 1] != ')') --at;
        return at != 0 && at + 1 < length && (text[at + 1] == 'Z' || text[at + 1] == 'X');
    }

    std::shared_ptr<Segment> segment_;
    const int ranks_;
    std::mutex mutex_;
    std::vector<Chore*> chores_;
};

}  // namespace gradsync::inline v0::shared_memory
