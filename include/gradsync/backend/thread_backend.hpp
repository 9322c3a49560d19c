#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
#include "../core/backend.hpp"
#include "../core/error.hpp"
#include "../core/shard_range.hpp"
#include "../kernel/host_buffer.hpp"
#include "../shared_memory/seat.hpp"

namespace gradsync::inline v0 {

/// A collective of a ThreadBackend. See the concept `Work`.
class ThreadWork {
public:
    ThreadWork() = default;
    ThreadWork(std::shared_ptr<shared_memory::Seat> seat, std::uint64_t number) noexcept
        : seat_(std::move(seat)), number_(number) {}
    ThreadWork(ThreadWork&&) noexcept = default;
    ThreadWork& operator=(ThreadWork&& other) noexcept {
        ThreadWork(std::move(other)).swap(*this);
        return *this;
    }
    ~ThreadWork() {
        if (seat_) seat_->abandon(number_);
    }

    /// Makes progress, never blocks; true if complete. Throws Error if the communicator has failed.
    bool test() {
        if (seat_ && seat_->test(number_)) seat_.reset();
        return !seat_;
    }

    /// Returns when complete. Throws Error, at the latest when the backend's time limit is reached.
    void wait() {
        if (!seat_) return;
        seat_->wait(number_);
        seat_.reset();
    }

private:
    void swap(ThreadWork& other) noexcept {
        std::swap(seat_, other.seat_);
        std::swap(number_, other.number_);
    }

    std::shared_ptr<shared_memory::Seat> seat_;
    std::uint64_t number_ = 0;
};

/// Ranks that are threads of one process. No dependency; the oracle that other backends are tested against.
///
/// - A reduction is one fused pass that reads every rank's elements and writes every rank's result; all ranks
///   work on it, by chunks. Elements are combined in rank order: the bits depend on nothing else.
/// - Collectives are advanced inside `progress()`, `test()` and `wait()` of any rank; there is no thread but the
///   user's. A rank that waits also works on the shares of those that are late.
/// - A handle may be used from several threads of its rank; the order of their starts is the order of the
///   collectives.
/// - If a rank fails, leaves early or reaches its time limit, every other rank's wait throws an Error that names it.
///   From then on every call on any communicator of the same origin throws the same.
/// - When the last handle of a rank goes, it counts as gone: collectives that others start later fail.
class ThreadBackend {
public:
    using WorkType = ThreadWork;
    static constexpr MemorySpace memory_space = MemorySpace::host;
    static constexpr std::chrono::nanoseconds default_timeout = std::chrono::minutes(5);

    /// The handles of `size` new ranks, for threads that you run yourself; `run_threads` does it for you.
    static std::vector<ThreadBackend> make(int size, std::chrono::nanoseconds timeout = default_timeout) {
        if (size < 1) throw Error(Errc::invalid_argument, "a ThreadBackend needs at least 1 rank, not " + std::to_string(size));
        std::vector<int> ranks;
        for (int r = 0; r < size; ++r) ranks.push_back(r);
        auto world = std::make_shared<shared_memory::World>(size);
        auto board = std::make_shared<shared_memory::Board>(std::move(world), std::move(ranks));
        std::vector<ThreadBackend> handles;
        for (int r = 0; r < size; ++r) handles.push_back(ThreadBackend(board, r, timeout));
        return handles;
    }

    int rank() const noexcept { return seat_->rank(); }
    int size() const noexcept { return seat_->board().size(); }

    std::chrono::nanoseconds timeout() const noexcept { return seat_->timeout(); }
    /// The limit of every wait of this rank, here and in communicators made from this one later.
    void set_timeout(std::chrono::nanoseconds limit) {
        if (limit <= std::chrono::nanoseconds::zero())
            throw Error(Errc::invalid_argument, "the time limit of a backend must be positive");
        seat_->set_timeout(limit);
    }

    ThreadWork all_reduce(BufferView buffer, ReduceOp op, Contribution contribution = {}) {
        shared_memory::Call call = reduction(shared_memory::Operation::all_reduce, buffer, buffer, op, contribution);
        return start(call);
    }
    ThreadWork reduce(BufferView buffer, ReduceOp op, int root, Contribution contribution = {}) {
        shared_memory::Call call = reduction(shared_memory::Operation::reduce, buffer, buffer, op, contribution);
        call.root = checked_root(root);
        return start(call);
    }
    ThreadWork reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op, Contribution contribution = {}) {
        check_shard("reduce_scatter", "out", out.count, in.count);
        return start(reduction(shared_memory::Operation::reduce_scatter, in, out, op, contribution));
    }
    ThreadWork all_gather(ConstBufferView in, BufferView out) {
        check_shard("all_gather", "in", in.count, out.count);
        return start(movement(shared_memory::Operation::all_gather, in, out, 0));
    }
    ThreadWork broadcast(BufferView buffer, int root) {
        return start(movement(shared_memory::Operation::broadcast, buffer, buffer, root));
    }
    ThreadWork gather(ConstBufferView in, BufferView out, int root) {
        if (rank() != root) out = {nullptr, 0, in.dtype, in.space};
        else check_shard("gather", "in", in.count, out.count);
        return start(movement(shared_memory::Operation::gather, in, out, root));
    }
    ThreadWork scatter(ConstBufferView in, BufferView out, int root) {
        if (rank() != root) in = {nullptr, 0, out.dtype, out.space};
        else check_shard("scatter", "out", out.count, in.count);
        return start(movement(shared_memory::Operation::scatter, in, out, root));
    }
    ThreadWork barrier() { return start({}); }

    /// Works on this rank's share of everything that all ranks have started; never blocks.
    void progress() noexcept { seat_->progress(); }

    /// The time that this rank has spent at work in `progress()` and `test()` so far.
    std::chrono::nanoseconds progress_time() const noexcept { return seat_->progress_time(); }

    /// Ends the communicator on all ranks: their outstanding and later calls throw Errc::peer_failed, naming this
    /// rank and `what`. Returns once no rank touches another's buffers.
    void fail(const std::string& what) noexcept {
        const int self = world_rank();
        seat_->fail({Errc::peer_failed, self, "rank " + std::to_string(self) + " failed: " + what});
    }

    /// Collective: the ranks with the same colour form a new communicator, in the order of (key, rank).
    ThreadBackend split(int color, int key) {
        struct Entry { std::int32_t color, key; };
        std::vector<Entry> entries(static_cast<std::size_t>(size()));
        const Entry own{color, key};
        const std::size_t number = seat_->next_split();
        all_gather({&own, 2, DType::i32, memory_space}, {entries.data(), 2 * entries.size(), DType::i32, memory_space}).wait();

        std::vector<std::tuple<int, int>> members;  // (key, rank)
        for (int r = 0; r < size(); ++r)
            if (const Entry& entry = entries[static_cast<std::size_t>(r)]; entry.color == color) members.emplace_back(entry.key, r);
        std::sort(members.begin(), members.end());
        std::vector<int> world_ranks;
        int rank_in_group = 0;
        for (const auto& [k, r] : members) {
            if (r == rank()) rank_in_group = static_cast<int>(world_ranks.size());
            world_ranks.push_back(seat_->board().world_rank(r));
        }
        const shared_memory::Board& parent = seat_->board();
        auto board = parent.world().meet({&parent, number, color}, static_cast<int>(members.size()), [&] {
            return std::make_shared<shared_memory::Board>(parent.shared_world(), world_ranks);
        });
        return ThreadBackend(std::move(board), rank_in_group, timeout());
    }

    /// Collective: the same ranks, with an order of their own.
    ThreadBackend duplicate() { return split(0, rank()); }

    /// Memory for buckets; see the concept.
    kernel::HostBuffer allocate(std::size_t bytes) { return kernel::HostBuffer(bytes); }

private:
    ThreadBackend(std::shared_ptr<shared_memory::Board> board, int rank, std::chrono::nanoseconds timeout)
        : seat_(std::make_shared<shared_memory::Seat>(std::move(board), rank, timeout)) {}

    int world_rank() const noexcept { return seat_->board().world_rank(rank()); }

    ThreadWork start(const shared_memory::Call& call) { return {seat_, seat_->start(call)}; }

    shared_memory::Call reduction(shared_memory::Operation operation, ConstBufferView in, BufferView out, ReduceOp op,
                                  Contribution contribution) const {
        if (op == ReduceOp::mean && !is_floating(in.dtype))
            throw Error(Errc::invalid_argument,
                        std::string(name_of(operation)) + ": a mean of " + std::string(name_of(in.dtype)) +
                            " is not defined; use ReduceOp::sum and divide",
                        {.operation = std::string(name_of(operation)), .rank = world_rank()});
        if (op != ReduceOp::mean && contribution != Contribution{})
            throw Error(Errc::invalid_argument,
                        std::string(name_of(operation)) + ": a Contribution goes with ReduceOp::mean only, not with " +
                            std::string(name_of(op)),
                        {.operation = std::string(name_of(operation)), .rank = world_rank()});
        shared_memory::Call call = movement(operation, in, out, 0);
        call.op = op;
        call.contribution = contribution;
        return call;
    }

    shared_memory::Call movement(shared_memory::Operation operation, ConstBufferView in, BufferView out, int root) const {
        // No text is made unless it is thrown: this is on the path of every collective.
        const auto refuse = [&](const std::string& what) {
            throw Error(Errc::invalid_argument, std::string(name_of(operation)) + ": " + what,
                        {.operation = std::string(name_of(operation)), .rank = world_rank()});
        };
        if (in.dtype != out.dtype)
            refuse("in and out must have one dtype, not " + std::string(name_of(in.dtype)) + " and " + std::string(name_of(out.dtype)));
        if (in.space != MemorySpace::host || out.space != MemorySpace::host)
            refuse("this backend reads host memory only; stage device buffers through the host");
        if ((!in.data && in.count != 0) || (!out.data && out.count != 0)) refuse("a buffer of more than 0 elements has no memory");
        shared_memory::Call call;
        call.operation = operation;
        call.in = in.data;
        call.out = out.data;
        call.in_count = in.count;
        call.out_count = out.count;
        call.dtype = in.dtype;
        call.root = checked_root(root);
        return call;
    }

    int checked_root(int root) const {
        if (root < 0 || root >= size())
            throw Error(Errc::invalid_argument,
                        "root " + std::to_string(root) + " is not a rank of this communicator of " + std::to_string(size()),
                        {.operation = {}, .rank = world_rank()});
        return root;
    }

    void check_shard(const char* operation, const char* side, std::size_t count, std::size_t whole) const {
        const std::size_t shard = shard_range(whole, size(), rank()).size();
        if (count != shard)
            throw Error(Errc::invalid_argument,
                        std::string(operation) + ": `" + side + "` must hold this rank's shard of " + std::to_string(whole) +
                            " elements, which is " + std::to_string(shard) + " (see shard_range), not " + std::to_string(count),
                        {.operation = operation, .rank = world_rank()});
    }

    std::shared_ptr<shared_memory::Seat> seat_;
};

static_assert(Work<ThreadWork>);
static_assert(Backend<ThreadBackend>);

}  // namespace gradsync::inline v0
