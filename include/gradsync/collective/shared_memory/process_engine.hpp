// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../core/clock.hpp"
#include "../../core/math.hpp"
#include "../../kernel/host_buffer.hpp"
#include "../engine.hpp"
#include "process_world.hpp"
#include "regions.hpp"
#include "seat.hpp"
#include "staged_pieces.hpp"

namespace gradsync::inline v0_2::shared_memory {

/// A communicator of processes of one machine, for buffers in any memory. Collectives work in place on buffers that all ranks can reach;
/// others go through a staging area, piece by piece. Reachability is known only once all ranks have published their calls. So every
/// collective starts on one board, and those that need staging go on, in the same order on all ranks, on a second.
///
/// Thread-safe; one thread at a time does the staging.
class ProcessEngine final : public collective::Engine, collective::ProgressHook {
    using Clock = std::chrono::steady_clock;
    static constexpr std::size_t piece_bytes = 256 * 1024;
    static constexpr std::size_t pieces_in_flight = 2;  ///< one is copied while the collective works on the other

public:
    /// Size of the memory that the ranks of a new communicator share.
    static constexpr std::size_t bytes(std::size_t ranks) noexcept {
        return 2 * Board::bytes(ranks) + ranks * pieces_in_flight * piece_bytes;
    }

    /// `memory`: `bytes(ranks)` bytes that all ranks see, zeroed, aligned to 64. `staging_region`: a region number of the world for the
    /// staging area, the same on all ranks.
    ProcessEngine(std::shared_ptr<ProcessWorld> world, std::shared_ptr<Regions> regions, std::vector<int> world_ranks, int rank,
                  std::shared_ptr<std::byte> memory, std::uint32_t staging_region, std::chrono::nanoseconds timeout)
        : world_(std::move(world)),
          regions_(std::move(regions)),
          staging_region_(staging_region),
          direct_(board(world_ranks, memory, 0), rank, timeout, space(world_ranks)),
          staged_(board(world_ranks, memory, 1), rank, timeout, space(world_ranks)) {
        std::byte* const area = memory.get() + 2 * Board::bytes(world_ranks.size());
        regions_->add(staging_region_, area, world_ranks.size() * pieces_in_flight * piece_bytes);
        own_area_ = area + static_cast<std::size_t>(rank) * pieces_in_flight * piece_bytes;
        world_->hooks()->enlist(*this);
    }
    ~ProcessEngine() override {
        world_->hooks()->dismiss(*this);
        regions_->remove(staging_region_);
    }

    int rank() const noexcept override { return direct_.rank(); }
    int size() const noexcept override { return direct_.board().size(); }
    int world_rank(int rank) const noexcept override { return direct_.board().world_rank(rank); }
    collective::World& world() const noexcept override { return *world_; }

    std::chrono::nanoseconds timeout() const noexcept override { return direct_.timeout(); }
    void set_timeout(std::chrono::nanoseconds limit) noexcept override {
        direct_.set_timeout(limit);
        staged_.set_timeout(limit);
    }
    std::size_t next_number() noexcept override { return direct_.next_number(); }

    std::uint64_t start(const Call& call) override {
        for (;;) {
            std::uint64_t oldest;
            {
                std::lock_guard lock(mutex_);
                // The direct seat remembers only for its last Board::slots collectives which of them need staging.
                if (first_ == calls_.size() || calls_.size() - classified_ < Board::slots / 2) {
                    const std::uint64_t n = direct_.start(call);
                    calls_.push_back({n, call});
                    return n;
                }
                oldest = calls_[first_].number;
            }
            wait(oldest);
        }
    }

    /// Makes progress on everything under way; never blocks.
    void progress() noexcept override { try_advance(); }

    std::chrono::nanoseconds progress_time() const noexcept override {
        return direct_.progress_time() + staged_.progress_time() + copy_time_.load(std::memory_order_relaxed);
    }

    bool test(std::uint64_t n) override { return advance(n); }

    /// Also waits for earlier collectives: they may need this rank's staging.
    void wait(std::uint64_t n) override {
        while (!advance(n)) {
            Whole oldest;
            bool is_staged;
            std::uint64_t piece;
            {
                std::lock_guard lock(mutex_);
                if (complete(n)) return;
                oldest = {calls_[first_].call, calls_[first_].number};
                is_staged = calls_[first_].whole.has_value();
                piece = landed_;
                if (is_staged && launched_ == landed_) continue;  // the piece could not be launched: the world has failed
            }
            // If these fail, `advance` says what it means for n.
            if (is_staged) staged_.await(piece, &oldest);
            else direct_.await(oldest.number);
        }
    }

    void look(std::uint64_t n, collective::Deadline& deadline) override {
        std::lock_guard lock(mutex_);
        if (complete(n)) return;
        const Whole oldest{calls_[first_].call, calls_[first_].number};
        if (!calls_[first_].whole) direct_.look(oldest.number, deadline);
        else if (launched_ != landed_) staged_.look(landed_, deadline, &oldest);
    }

    /// The ranks that keep collective n from completing.
    collective::Late late(std::uint64_t n) noexcept {
        std::lock_guard lock(mutex_);
        if (complete(n)) return {};
        if (!calls_[first_].whole) return direct_.late(n);
        collective::Late late = staged_.late(landed_);
        late.did = collective::Late::Did::not_go_on;
        return late;
    }

    void abandon(std::uint64_t n) noexcept override {
        {
            std::lock_guard lock(mutex_);
            if (complete(n)) return;
        }
        // It may be complete without any work of this rank.
        if (!world_->failed()) try_advance();
        if (direct_.done(n) && !direct_.elsewhere(n)) return;
        direct_.fail_abandoned(n);
        let_buffers_go();
    }

    /// Ends the world and returns once no rank touches another's buffers.
    void fail(const Failure& failure) noexcept override {
        direct_.fail(failure);
        let_buffers_go();
    }

    /// Memory that every rank has mapped; each rank uses its own part. If the system has none left, returns private memory of this process,
    /// on which collectives are slower. Collective.
    collective::Memory allocate(std::size_t bytes) override {
        if (bytes == 0) return {};
        if (size() == 1) return collective::Memory::of(kernel::HostBuffer(bytes));
        constexpr std::size_t page = 4096, huge_page = std::size_t{2} << 20;
        const std::size_t unit = bytes >= huge_page ? huge_page : page;
        const std::size_t stride = gradsync::detail::round_up(bytes, unit);
        std::string problem;
        Segment created;
        Offer own;
        if (rank() == 0) own = offer(created, stride * static_cast<std::size_t>(size()), problem);
        const Offer chosen = exchange(own).front();
        Segment segment = open(chosen, problem);
        if (const int without = who_has_not(segment); without >= 0) {
            std::lock_guard lock(mutex_);
            remark_ = ", but " + std::to_string(bytes) + " bytes that were to be shared are copied: " +
                      (problem.empty() ? "see rank " + std::to_string(world_rank(without)) : problem);
            return collective::Memory::of(kernel::HostBuffer(bytes));
        }
        const auto number = static_cast<std::uint32_t>(chosen.region);
        auto lent = std::make_shared<LentRegion>(regions_, number, std::move(segment));
        std::byte* const data = lent->segment.data() + stride * static_cast<std::size_t>(rank());
        return collective::Memory(std::shared_ptr<void>(std::move(lent), data));
    }

    std::string remark() const override {
        std::lock_guard lock(mutex_);
        return remark_;
    }

    /// The first member of each group makes its memory; all ranks of this communicator exchange the handles.
    std::shared_ptr<collective::Engine> split(const collective::Group& group) override {
        const std::size_t room = ProcessEngine::bytes(group.members.size());
        std::string problem;
        Segment created;
        Offer own;
        if (group.rank == 0) own = offer(created, room, problem);
        const Offer chosen = exchange(own)[static_cast<std::size_t>(group.members.front())];
        auto segment = std::make_shared<Segment>(open(chosen, problem));
        if (who_has_not(*segment) >= 0)
            throw Error(Errc::invalid_argument,
                        "split on rank " + std::to_string(world_rank(rank())) + ": no shared memory of " + std::to_string(room) + " bytes" +
                            (problem.empty() ? "" : " (" + problem + ")"),
                        {.operation = "split", .rank = world_rank(rank())});
        std::vector<int> world_ranks;
        for (const int r : group.members) world_ranks.push_back(world_rank(r));
        std::shared_ptr<std::byte> memory(segment, segment->data());
        return std::make_shared<ProcessEngine>(world_, regions_, std::move(world_ranks), group.rank, std::move(memory),
                                               static_cast<std::uint32_t>(chosen.region), timeout());
    }

private:
    /// A segment that its creator offers to others, and the number that its region has everywhere.
    struct Offer {
        Segment::IpcHandle handle;
        std::uint64_t region = 0;
    };
    /// While this lives, collectives find their buffers in the region.
    struct LentRegion {
        LentRegion(std::shared_ptr<Regions> regions_, std::uint32_t number_, Segment segment_)
            : regions(std::move(regions_)), number(number_), segment(std::move(segment_)) {
            regions->add(number, segment.data(), segment.bytes());
        }
        ~LentRegion() { regions->remove(number); }
        std::shared_ptr<Regions> regions;
        std::uint32_t number;
        Segment segment;
    };

    Offer offer(Segment& created, std::size_t bytes, std::string& problem) const {
        created = Segment::attempt(problem, [&] { return Segment::create(bytes); });
        return {created.ipc_handle(), world_->next_region()};
    }
    static Segment open(const Offer& offer, std::string& problem) {
        return offer.handle.descriptor < 0 ? Segment() : Segment::attempt(problem, [&] { return Segment::open(offer.handle); });
    }
    /// Returns the first rank of this communicator that could not open its segment, or -1. The creators keep their segments until it is
    /// known. Collective.
    int who_has_not(const Segment& segment) {
        const std::vector<std::uint8_t> good = exchange(static_cast<std::uint8_t>(segment.data() != nullptr));
        const auto found = std::find(good.begin(), good.end(), 0);
        return found == good.end() ? -1 : static_cast<int>(found - good.begin());
    }

    struct Started {
        std::uint64_t number = 0;
        Call call;
        std::optional<std::size_t> whole = {};  ///< elements of the whole buffer, if it is staged
        bool complete = false;
    };

    std::shared_ptr<Board> board(const std::vector<int>& world_ranks, const std::shared_ptr<std::byte>& memory, std::size_t index) const {
        return std::make_shared<Board>(world_, world_ranks,
                                       std::shared_ptr<std::byte>(memory, memory.get() + index * Board::bytes(world_ranks.size())));
    }

    /// A waiting rank advances its staging, here and in other communicators.
    class Space : public RegionSpace {
    public:
        Space(std::shared_ptr<const Regions> regions, bool alone, ProcessWorld& world) noexcept
            : RegionSpace(std::move(regions), alone), world_(&world) {}
        void idle() const noexcept { world_->hooks()->try_advance(); }

    private:
        ProcessWorld* world_;
    };
    Space space(const std::vector<int>& world_ranks) const { return {regions_, world_ranks.size() == 1, *world_}; }

    /// Requires the mutex. Numbers are consecutive.
    bool complete(std::uint64_t n) const noexcept {
        return first_ == calls_.size() || n < calls_[first_].number || calls_[index_of(n)].complete;
    }
    std::size_t index_of(std::uint64_t n) const noexcept { return first_ + static_cast<std::size_t>(n - calls_[first_].number); }

    /// Finds completed collectives, and makes all possible progress on staged ones. True if collective n is complete; throws Error if it is
    /// not and the world has failed.
    bool advance(std::uint64_t n) {
        // Read before looking: collectives that the failed rank had seen complete are found complete here too.
        const bool failed = world_->failed();
        // The work itself takes long and is done without the mutex: other threads can go on starting.
        if (failed) {
            direct_.catch_up();
            staged_.catch_up();
        } else {
            direct_.progress();
            staged_.progress();
        }
        Operation operation;
        {
            std::lock_guard lock(mutex_);
            advance_calls();
            if (complete(n)) return true;
            if (!failed) return false;
            operation = calls_[index_of(n)].call.operation;
            buffers_may_go_ = true;
        }
        direct_.throw_failure(operation);
    }

    /// After a failure: makes sure that no thread of this rank copies from or to the trainer's buffers again.
    void let_buffers_go() noexcept {
        std::lock_guard lock(mutex_);
        buffers_may_go_ = true;
    }

    void try_advance() noexcept override {
        direct_.progress();
        staged_.progress();
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock || world_->failed()) return;
        advance_calls();
    }

    /// Requires the mutex.
    void advance_calls() noexcept {
        for (; classified_ < calls_.size(); ++classified_) {
            Started& next = calls_[classified_];
            if (!direct_.done(next.number)) break;
            next.whole = direct_.elsewhere(next.number);
            next.complete = !next.whole;
        }
        while (first_ < classified_) {
            Started& oldest = calls_[first_];
            if (!oldest.complete && !advance_staged(oldest)) break;
            ++first_;
        }
        if (first_ == calls_.size() || first_ >= Board::slots) {
            calls_.erase(calls_.begin(), calls_.begin() + static_cast<std::ptrdiff_t>(first_));
            classified_ -= first_;
            first_ = 0;
        }
    }

    /// Requires the mutex, as all functions below.
    bool advance_staged(Started& started) noexcept {
        if (!pieces_) pieces_.emplace(started.call, *started.whole, rank(), size(), piece_bytes);
        for (;;) {
            bool moved = false;
            if (!pieces_->all_taken() && launched_ - landed_ < pieces_in_flight && !world_->failed()) {
                const auto begin = Clock::now();
                moved = launch(started);
                add_copy_time(begin);
            }
            if (landed_ < launched_ && staged_.done(landed_) && !buffers_may_go_) {
                const auto begin = Clock::now();
                land(started, in_flight_[landed_ % pieces_in_flight]);
                add_copy_time(begin);
                ++landed_;
                moved = true;
            }
            if (pieces_->all_taken() && landed_ == launched_) {
                pieces_.reset();
                return started.complete = true;
            }
            if (!moved) return false;
        }
    }

    void add_copy_time(Clock::time_point begin) noexcept {
        copy_time_.store(copy_time_.load(std::memory_order_relaxed) + (Clock::now() - begin), std::memory_order_relaxed);
    }

    std::byte* area(std::uint64_t piece) const noexcept { return own_area_ + piece % pieces_in_flight * piece_bytes; }

    /// Returns false if the world fails meanwhile; the waiting caller gets the error.
    bool launch(const Started& started) noexcept {
        StagedPieces left = *pieces_;
        const StagedPieces::Piece piece = left.take();
        std::byte* const room = area(launched_);
        const std::size_t width = size_of(started.call.dtype);
        if (const auto [range, begins] = left.brings(piece); range.size() != 0)
            std::memcpy(room + (range.first - piece.range.first) * width,
                        static_cast<const std::byte*>(started.call.in) + (range.first - begins) * width, range.size() * width);
        try {
            staged_.start(left.call_on(room, piece));
        } catch (...) {
            return false;
        }
        in_flight_[launched_++ % pieces_in_flight] = piece;
        pieces_ = left;
        return true;
    }

    void land(const Started& started, const StagedPieces::Piece& piece) noexcept {
        const std::size_t width = size_of(started.call.dtype);
        if (const auto [range, begins] = pieces_->fetches(piece); range.size() != 0)
            std::memcpy(static_cast<std::byte*>(started.call.out) + (range.first - begins) * width,
                        area(landed_) + (range.first - piece.range.first) * width, range.size() * width);
    }

    const std::shared_ptr<ProcessWorld> world_;
    const std::shared_ptr<Regions> regions_;
    const std::uint32_t staging_region_;
    Seat<Space> direct_;
    Seat<Space> staged_;
    std::byte* own_area_ = nullptr;

    mutable std::mutex mutex_;
    std::string remark_;
    std::vector<Started> calls_;  ///< from first_ on: not known to be complete, or behind such a call
    std::size_t first_ = 0;
    std::size_t classified_ = 0;          ///< calls below this index are known to be staged or not
    std::optional<StagedPieces> pieces_;  ///< pieces of the oldest call that have not been launched, if it is staged
    StagedPieces::Piece in_flight_[pieces_in_flight];
    std::uint64_t launched_ = 0;  ///< number of pieces; also the staged seat's collective numbers
    std::uint64_t landed_ = 0;
    bool buffers_may_go_ = false;  ///< the trainer has seen a failure, or has reported one
    std::atomic<std::chrono::nanoseconds> copy_time_{std::chrono::nanoseconds::zero()};
};

}  // namespace gradsync::inline v0_2::shared_memory
