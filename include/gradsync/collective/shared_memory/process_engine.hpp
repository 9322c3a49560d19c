// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../../kernel/host_buffer.hpp"
#include "../engine.hpp"
#include "../in_flight.hpp"
#include "../process.hpp"
#include "chunks.hpp"
#include "regions.hpp"
#include "seat.hpp"
#include "segment.hpp"

namespace gradsync::inline v0_2::shared_memory {

/// The world of ranks that are processes of one machine. Their shared state is in a segment, which also has room for
/// the shared state of the first communicator. One process creates the segment; every rank then joins.
class ProcessWorld : public collective::World {
public:
    /// Creates the segment for `ranks` ranks, some of which may run on other machines. `room`: bytes for `memory()`.
    static Segment create(int ranks, std::size_t room) { return Segment::create(room_offset(ranks) + room); }

    /// Makes the calling process rank `rank` of `ranks`, of which `ranks_here` run on this machine.
    ProcessWorld(const Segment& segment, int rank, int ranks, int ranks_here)
        : World(ranks_here,
                collective::Shared<State>(segment.memory(), &reinterpret_cast<Shared*>(segment.data())->state),
                collective::Shared<collective::ProgressHooks>::make()),
          segment_(segment.memory()),
          ranks_(ranks) {
        processes()[rank].store(self_.number, std::memory_order_release);
    }

    /// Memory that all ranks see, zeroed, aligned to 64 bytes. The pointer keeps the segment alive.
    collective::Shared<std::byte> memory() const { return {segment_, segment_.get() + room_offset(ranks_)}; }

    /// False once the process has died; true if it has not joined yet.
    bool alive(int world_rank) noexcept override {
        const std::int64_t number = processes()[world_rank].load(std::memory_order_acquire);
        return number == 0 ||
               collective::ProcessIdentity{.machine = self_.machine, .system = self_.system, .number = number}.alive(
                   self_);
    }

    /// Returns the number of a new region, 1 or more; no other rank gets it.
    std::uint32_t next_region() noexcept { return shared().regions.fetch_add(1, std::memory_order_relaxed) + 1; }

private:
    struct Shared {
        State state;
        std::atomic<std::uint32_t> regions{0};
    };

    static constexpr std::size_t room_offset(int ranks) noexcept {
        return detail::in_lines(sizeof(Shared)) +
               detail::in_lines(static_cast<std::size_t>(ranks) * sizeof(std::atomic<std::int64_t>));
    }

    Shared& shared() const noexcept { return *reinterpret_cast<Shared*>(segment_.get()); }
    std::atomic<std::int64_t>* processes() const noexcept {
        return reinterpret_cast<std::atomic<std::int64_t>*>(segment_.get() + detail::in_lines(sizeof(Shared)));
    }

    collective::Shared<std::byte> segment_;
    const int ranks_;
    const collective::ProcessIdentity self_ = collective::ProcessIdentity::own();
};

/// A communicator of processes of one machine, for buffers in any memory. Collectives work in place on buffers that all
/// ranks can reach; others go through a staging area, piece by piece. Reachability is known only once all ranks have
/// published their calls. So every collective starts on one board, and those that need staging continue, in the same
/// order on all ranks, on a second.
///
/// Thread-safe; one thread at a time does the staging.
class ProcessEngine final : public collective::Engine {
    using Clock = std::chrono::steady_clock;
    static constexpr std::size_t piece_bytes = 256 * 1024;
    static constexpr std::size_t pieces_in_flight = 2;  ///< one is copied while the collective works on the other

public:
    /// The size of the memory that the ranks of a new communicator share.
    static constexpr std::size_t bytes(std::size_t ranks) noexcept {
        return 2 * Board::bytes(ranks) + ranks * pieces_in_flight * piece_bytes;
    }

    /// `memory`: `bytes(ranks)` bytes that all ranks see, zeroed, aligned to 64. `staging_region`: a region number of
    /// the world for the staging area, the same on all ranks.
    [[gnu::cold]] ProcessEngine(Shared<ProcessWorld> world, Shared<Regions> regions, List<int> world_ranks, int rank,
                                Shared<std::byte> memory, std::uint32_t staging_region,
                                std::chrono::nanoseconds timeout)
        : Engine(std::move(world_ranks), rank, timeout),
          world_(std::move(world)),
          regions_(std::move(regions)),
          staging_region_(staging_region),
          direct_(board(memory, 0), rank, timeout, RegionSpace(regions_, this->world_ranks())),
          staged_(board(memory, 1), rank, timeout, RegionSpace(regions_, this->world_ranks())) {
        const auto ranks = static_cast<std::size_t>(size());
        std::byte* const area = memory.get() + 2 * Board::bytes(ranks);
        regions_->add(staging_region_, area, ranks * pieces_in_flight * piece_bytes, this->world_ranks());
        own_area_ = area + static_cast<std::size_t>(rank) * pieces_in_flight * piece_bytes;
        world_->hooks().enlist(*this);
    }
    [[gnu::cold]] ~ProcessEngine() override {
        world_->hooks().dismiss(*this);
        regions_->remove(staging_region_);
    }

    collective::World& world() const noexcept override { return *world_; }

    void set_timeout(std::chrono::nanoseconds limit) noexcept override {
        Engine::set_timeout(limit);
        direct_.set_timeout(limit);
        staged_.set_timeout(limit);
    }

    std::uint64_t start(const Call& call, ShardStep* step = nullptr) override {
        return start_in_turn(call.operation, [&](std::uint64_t& oldest) -> std::optional<std::uint64_t> {
            std::lock_guard lock(mutex_);
            oldest = started_.first();
            // The direct seat remembers which collectives need staging only for its last Board::slots.
            if (!started_.empty() && started_.next() - classified_ >= Board::slots / 2) return std::nullopt;
            return started_.add([&](Started& started, std::uint64_t) {
                direct_.start(call, step);  // both count from 0
                started = {call};
            });
        });
    }

    /// Makes progress on everything in flight; never blocks.
    void progress() noexcept override {
        direct_.progress();
        staged_.progress();
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock && !world_->failed()) advance_started();
    }

    std::chrono::nanoseconds progress_time() const noexcept override {
        return direct_.progress_time() + staged_.progress_time() + copy_time_.load(std::memory_order_relaxed);
    }

    /// Finds completed collectives, and makes all possible progress on staged ones.
    std::optional<Call> advance_to(std::uint64_t n) noexcept override {
        // The work itself takes long and runs without the mutex, so that other threads can keep starting.
        if (world_->failed()) {
            direct_.catch_up();
            staged_.catch_up();
        } else {
            direct_.progress();
            staged_.progress();
        }
        std::lock_guard lock(mutex_);
        advance_started();
        return is_complete(n) ? std::nullopt : std::optional(started_[n].call);
    }

    /// Also waits for earlier collectives: they may need this rank's staging.
    void wait(std::uint64_t n) override {
        while (!test(n)) {
            Whole oldest;
            bool is_staged;
            std::uint64_t piece;
            {
                std::lock_guard lock(mutex_);
                if (is_complete(n)) return;
                oldest = {started_.oldest().call, started_.first()};
                is_staged = started_.oldest().whole.has_value();
                piece = pieces_in_flight_.first();
                if (is_staged && pieces_in_flight_.empty())
                    continue;  // the piece could not be launched: the world has failed
            }
            // If these fail, `test` finds out what it means for n.
            if (is_staged) staged_.await(piece, &oldest);
            else direct_.await(oldest.number);
        }
    }

    void look(std::uint64_t n, collective::Deadline& deadline) override {
        std::lock_guard lock(mutex_);
        if (is_complete(n)) return;
        const Whole oldest{started_.oldest().call, started_.first()};
        if (!started_.oldest().whole) direct_.look(oldest.number, deadline);
        else if (!pieces_in_flight_.empty()) staged_.look(pieces_in_flight_.first(), deadline, &oldest);
    }

    /// The ranks that hold up collective n.
    collective::Late late(std::uint64_t n) override {
        std::lock_guard lock(mutex_);
        if (is_complete(n)) return {};
        if (!started_.oldest().whole) return direct_.late(n);
        collective::Late late = staged_.late(pieces_in_flight_.first());
        late.did = collective::Late::Did::not_go_on;
        return late;
    }

    /// Ends the world and returns once no rank touches another's buffers.
    void fail(const Failure& failure) noexcept override {
        direct_.fail(failure);
        {
            // No thread of this rank copies from or to the trainer's buffers again.
            std::lock_guard lock(mutex_);
            buffers_may_go_ = true;
        }
        world_->hooks().deliver_failure();  // ranks of other machines may wait for this one in another communicator
    }

    /// Memory that every rank has mapped; each rank uses its own part. If the system has none left, returns private
    /// memory of this process, on which collectives are slower. Collective.
    [[gnu::cold]] collective::Memory allocate(std::size_t bytes) override {
        if (bytes == 0) return {};
        if (size() == 1) return collective::memory_of(kernel::HostBuffer(bytes));
        const std::size_t unit = bytes >= Segment::huge_page ? Segment::huge_page : Segment::page;
        const std::size_t stride = detail::round_up(bytes, unit);
        SharedSegment shared = share(0, stride * static_cast<std::size_t>(size()));
        if (shared.without >= 0) {
            std::lock_guard lock(mutex_);
            remark_ = text(", but ", bytes, " bytes that were to be shared are copied: ",
                           shared.problem.empty() ? text("see rank ", world_rank(shared.without)) : shared.problem);
            return collective::memory_of(kernel::HostBuffer(bytes));
        }
        const auto number = static_cast<std::uint32_t>(shared.number);
        regions_->add(number, shared.segment.data(), shared.segment.bytes(), world_ranks());
        std::byte* const data = shared.segment.data() + stride * static_cast<std::size_t>(rank());
        const auto take_back = [regions = regions_, number, mapped = shared.segment.memory()](void*) {
            regions->remove(number);
        };
        return Shared<void>::of(data, take_back);
    }

    [[gnu::cold]] collective::Memory adopt(std::span<std::byte> region) override {
        std::string problem = AdoptedPages::problem_of(region);
        check_size("adopt", region.size(), problem);
        collective::Memory shared = size() == 1 ? collective::Memory() : allocate(region.size());
        const auto number = regions_->number_of(shared.data());
        if (!number) return {};
        auto* const part = static_cast<std::byte*>(shared.data());
        Shared<AdoptedPages> pages;
        try {
            pages = Shared<AdoptedPages>::make(region, part);
        } catch (const std::exception& error) {
            problem = error.what();
        }
        check_size("adopt", region.size(), problem);
        regions_->add_alias(*number, part, region.data(), region.size());
        return Shared<void>::of(static_cast<void*>(region.data()), [shared = std::move(shared), pages](void*) {});
    }

    [[gnu::cold]] bool shares(const void* data, std::size_t bytes) const noexcept override {
        const void* published = nullptr;
        return size() == 1 || bytes == 0 || regions_->publish(data, bytes, *world_ranks(), published);
    }

    bool steps_inside() const noexcept override { return true; }

    std::string remark() const override {
        std::lock_guard lock(mutex_);
        return remark_;
    }

    /// The first member of each group makes its memory; all ranks of this communicator exchange the handles.
    [[gnu::cold]] Shared<collective::Engine> split(const collective::Group& group) override {
        const std::size_t room = bytes(group.members.size());
        SharedSegment shared = share(group.members.front(), room);
        if (shared.without >= 0) {
            const int culprit = world_rank(shared.without);
            detail::raise(shared.problem.empty() ? Errc::peer_failed : Errc::invalid_argument,
                          {.operation = "split", .rank = own_world_rank(), .peer = culprit}, "split on rank ",
                          own_world_rank(), ": no shared memory of ", room, " bytes",
                          shared.problem.empty() ? text(": rank ", culprit, " could not get it; see what it says")
                                                 : " (" + shared.problem + ")");
        }
        return Shared<ProcessEngine>::make(world_, regions_, world_ranks_of(group), group.rank, shared.segment.memory(),
                                           static_cast<std::uint32_t>(shared.number), timeout());
    }

private:
    /// A segment of `bytes` bytes made by rank `creator`, and the number of its region on every rank. Collective.
    [[gnu::cold]] SharedSegment share(int creator, std::size_t bytes) {
        const auto for_huge_pages = timeout() / 8;  // others wait meanwhile
        const auto create = [&] {
            if (bytes > Regions::largest) throw std::runtime_error(text("cannot share ", bytes, " bytes at once"));
            return Segment::create(bytes, for_huge_pages);
        };
        return SharedSegment::share([this](const auto& own) { return exchange(own); }, rank(), creator, create,
                                    rank() == creator ? world_->next_region() : 0, for_huge_pages);
    }

    struct Started {
        Call call;
        std::optional<std::size_t> whole = {};  ///< elements of the whole buffer, if it is staged
    };

    Shared<Board> board(const Shared<std::byte>& memory, std::size_t index) const {
        return Shared<Board>::make(
            world_, world_ranks(),
            Shared<std::byte>(memory, memory.get() + index * Board::bytes(static_cast<std::size_t>(size()))));
    }

    // All functions below require the mutex.

    bool is_complete(std::uint64_t n) const noexcept {
        if (n >= classified_) return direct_.done(n) && !direct_.elsewhere(n);
        return started_.is_over(n) || !started_[n].whole;
    }

    void advance_started() noexcept {
        for (; classified_ < started_.next() && direct_.done(classified_); ++classified_)
            started_[classified_].whole = direct_.elsewhere(classified_);
        started_.retire([this](Started& oldest) {
            return started_.first() < classified_ && (!oldest.whole || advance_staged(oldest));
        });
    }

    bool advance_staged(const Started& started) noexcept {
        if (!pieces_) pieces_.emplace(started.call, *started.whole, rank(), size(), piece_bytes);
        for (;;) {
            bool moved = false;
            if (!pieces_->all_taken() && pieces_in_flight_.size() < pieces_in_flight && !world_->failed()) {
                const auto begin = Clock::now();
                moved = launch(started);
                add_copy_time(begin);
            }
            pieces_in_flight_.retire([&](const StagedPieces::Piece& piece) {
                const std::uint64_t n = pieces_in_flight_.first();
                if (!staged_.done(n) || buffers_may_go_) return false;
                const auto begin = Clock::now();
                land(started, piece, n);
                add_copy_time(begin);
                return moved = true;
            });
            if (pieces_->all_taken() && pieces_in_flight_.empty()) {
                pieces_.reset();
                return true;
            }
            if (!moved) return false;
        }
    }

    void add_copy_time(Clock::time_point begin) noexcept {
        copy_time_.store(copy_time_.load(std::memory_order_relaxed) + (Clock::now() - begin),
                         std::memory_order_relaxed);
    }

    std::byte* area(std::uint64_t piece) const noexcept { return own_area_ + piece % pieces_in_flight * piece_bytes; }

    /// Returns false if the world fails meanwhile; the waiting caller gets the error.
    bool launch(const Started& started) noexcept {
        StagedPieces left = *pieces_;
        const StagedPieces::Piece piece = left.take();
        std::byte* const room = area(pieces_in_flight_.next());
        const std::size_t width = size_of(started.call.dtype);
        if (const auto [range, begins] = left.brings(piece); range.size() != 0)
            std::memcpy(room + (range.first - piece.range.first) * width,
                        static_cast<const std::byte*>(started.call.in) + (range.first - begins) * width,
                        range.size() * width);
        try {
            pieces_in_flight_.add([&](StagedPieces::Piece& place, std::uint64_t) {
                staged_.start(left.call_on(room, piece));
                place = piece;
            });
        } catch (...) {
            return false;
        }
        pieces_ = left;
        return true;
    }

    void land(const Started& started, const StagedPieces::Piece& piece, std::uint64_t number) noexcept {
        const std::size_t width = size_of(started.call.dtype);
        if (const auto [range, begins] = pieces_->fetches(piece); range.size() != 0)
            std::memcpy(static_cast<std::byte*>(started.call.out) + (range.first - begins) * width,
                        area(number) + (range.first - piece.range.first) * width, range.size() * width);
    }

    const Shared<ProcessWorld> world_;
    const Shared<Regions> regions_;
    const std::uint32_t staging_region_;
    Seat<RegionSpace> direct_, staged_;
    std::byte* own_area_ = nullptr;

    mutable std::mutex mutex_;
    std::string remark_;
    collective::InFlight<Started> started_;  ///< the first one is not known to be complete
    std::uint64_t classified_ = 0;           ///< collectives below this number are known to be staged or not
    std::optional<StagedPieces> pieces_;     ///< pieces of the oldest collective not yet launched, if it is staged
    /// Their numbers are also the staged seat's.
    collective::InFlight<StagedPieces::Piece> pieces_in_flight_{pieces_in_flight};
    bool buffers_may_go_ = false;  ///< the trainer has seen or reported a failure
    std::atomic<std::chrono::nanoseconds> copy_time_{std::chrono::nanoseconds::zero()};
};

}  // namespace gradsync::inline v0_2::shared_memory
