// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/core/backend.hpp>
#include <gradsync/core/shard_range.hpp>

#include "oracle.hpp"

namespace gradsync_test {

enum class Operation { all_reduce, reduce, reduce_scatter, all_gather, broadcast, gather, scatter, barrier };
inline constexpr int operation_count = 8;

/// What the ranks bring to a mean: all alike; local means with weights; local sums with counts; rank 1 (or 0, if it
/// is alone) without data, its buffer full of NaN; that rank without data, but counted; nobody has data; nothing counts.
enum class Shares { even, weighted, counted, absent, absent_but_counted, nobody, weightless };
inline constexpr int shares_count = 7;

/// One collective, as all ranks know it.
struct Collective {
    Operation operation = Operation::barrier;
    gradsync::DType dtype = gradsync::DType::f32;
    gradsync::ReduceOp op = gradsync::ReduceOp::sum;
    Shares shares = Shares::even;
    std::size_t count = 0;  ///< elements of the whole buffer
    int root = 0;
    bool in_place = false;  ///< reduce_scatter and all_gather: the shard is its place in the whole buffer
    std::uint64_t seed = 0;
    bool any_order = false;  ///< the backend may add up in another order than the ranks', and round in between

    bool reduces() const noexcept { return operation <= Operation::reduce_scatter; }
    bool selects() const noexcept { return op == gradsync::ReduceOp::min || op == gradsync::ReduceOp::max; }
    /// Are the inputs chosen so that the result has the same bits in any order? In 16 bits only those of some seeds: the others show how
    /// sums round, but need a tolerance within which an input may count twice.
    bool is_representable() const noexcept {
        return any_order && reduces() && !selects() && (is_float8(dtype) || (gradsync::is_low_precision(dtype) && seed % 7 > 3));
    }

    std::string describe() const {
        constexpr const char* names[] = {"all_reduce", "reduce", "reduce_scatter", "all_gather",
                                         "broadcast",  "gather", "scatter",        "barrier"};
        return std::string(names[static_cast<int>(operation)]) + "(" + std::string(name_of(dtype)) + ", " +
               (reduces() ? std::string(name_of(op)) + ", shares " + std::to_string(static_cast<int>(shares)) + ", " : std::string()) +
               std::to_string(count) + " elements, root " + std::to_string(root) + (in_place ? ", in place" : "") + ")";
    }

    gradsync::Contribution contribution(int rank, int size) const noexcept {
        if (op != gradsync::ReduceOp::mean) return {};
        // The sum of all is a power of two, and so it is on each of two machines.
        constexpr int representable[4][4] = {{1}, {1, 3}, {1, 1, 2}, {1, 3, 3, 1}};
        const double own = is_representable() ? representable[size - 1][rank] : 3 + 2 * rank;
        const bool without = rank == (size > 1 ? 1 : 0);
        switch (shares) {
            case Shares::even: return {};
            case Shares::weighted: return {own, own};
            case Shares::counted: return {1, own};
            case Shares::absent: return without ? gradsync::Contribution{0, 0} : gradsync::Contribution{};
            case Shares::absent_but_counted: return without ? gradsync::Contribution{0, 1} : gradsync::Contribution{};
            case Shares::nobody: return {0, 0};
            case Shares::weightless: return {1, 0};
        }
        return {};
    }

    /// What rank `rank` brings: whole elements, of which the operations that start from shards take its shard.
    Bytes input(int rank, int size) const {
        if (contribution(rank, size).scale == 0) return Bytes(count * size_of(dtype), std::byte{0xff});  // NaN
        const std::uint64_t own_seed = seed * 64 + static_cast<std::uint64_t>(rank);
        return is_representable() ? representable_elements(dtype, op, count, own_seed) : random_elements(dtype, count, own_seed);
    }
};

/// One rank's part in a collective: its buffers, the call, and the check of all that it may and may not have
/// written. Keep it until the Work is complete.
template <class Memory>
class Exchange {
public:
    Exchange(const Collective& what, int rank, int size) : what_(what), rank_(rank), size_(size) {
        const gradsync::ElementRange range = gradsync::shard_range(what.count, size, rank);
        const std::size_t width = size_of(what.dtype), whole = what.count * width;
        shard_first_ = range.first * width;
        const std::size_t shard = range.size() * width;
        const bool root = rank == what.root;
        const Bytes own = what.input(rank, size);
        switch (what.operation) {
            case Operation::all_reduce:
            case Operation::reduce:
            case Operation::broadcast: prepare(own, 0, whole); break;
            case Operation::reduce_scatter:
                if (what.in_place) prepare(own, shard_first_, shard);
                else prepare_two(own, shard);
                break;
            case Operation::all_gather:
                if (what.in_place) {
                    Bytes filler(whole, std::byte{0x3c});
                    std::copy_n(own.begin() + offset(shard_first_), shard, filler.begin() + offset(shard_first_));
                    prepare(filler, 0, whole);
                } else prepare_two(part(own, shard_first_, shard), whole);
                break;
            case Operation::gather: prepare_two(part(own, shard_first_, shard), root ? whole : 0); break;
            case Operation::scatter: prepare_two(root ? own : Bytes(), shard); break;
            case Operation::barrier: prepare({}, 0, 0); break;
        }
        shard_ = shard;
    }

    template <gradsync::Backend B>
    typename B::WorkType start(B& backend) {
        const auto in = [&](std::size_t bytes) {
            return gradsync::ConstBufferView{first_.data() + guard(), bytes / size_of(what_.dtype), what_.dtype, B::memory_space};
        };
        const auto out = [&](Memory& memory, std::size_t first, std::size_t bytes) {
            return gradsync::BufferView{memory.data() + guard() + first, bytes / size_of(what_.dtype), what_.dtype, B::memory_space};
        };
        const std::size_t whole = what_.count * size_of(what_.dtype);
        const bool mean = what_.op == gradsync::ReduceOp::mean, root = rank_ == what_.root;
        const gradsync::Contribution c = what_.contribution(rank_, size_);
        switch (what_.operation) {
            case Operation::all_reduce: {
                const auto buffer = out(first_, 0, whole);
                return mean ? backend.all_reduce(buffer, what_.op, c) : backend.all_reduce(buffer, what_.op);
            }
            case Operation::reduce: {
                const auto buffer = out(first_, 0, whole);
                return mean ? backend.reduce(buffer, what_.op, what_.root, c) : backend.reduce(buffer, what_.op, what_.root);
            }
            case Operation::reduce_scatter: {
                const auto shard = what_.in_place ? out(first_, shard_first_, shard_) : out(second_, 0, shard_);
                return mean ? backend.reduce_scatter(in(whole), shard, what_.op, c) : backend.reduce_scatter(in(whole), shard, what_.op);
            }
            case Operation::all_gather:
                if (what_.in_place) return backend.all_gather(out(first_, shard_first_, shard_), out(first_, 0, whole));
                return backend.all_gather(in(shard_), out(second_, 0, whole));
            case Operation::broadcast: return backend.broadcast(out(first_, 0, whole), what_.root);
            case Operation::gather: return backend.gather(in(shard_), root ? out(second_, 0, whole) : gradsync::BufferView{}, what_.root);
            case Operation::scatter:
                return backend.scatter(root ? in(whole) : gradsync::ConstBufferView{}, out(second_, 0, shard_), what_.root);
            case Operation::barrier: break;
        }
        return backend.barrier();
    }

    /// What is wrong after the Work is complete, or "".
    std::string verify(bool exact) {
        const bool root = rank_ == what_.root;
        Bytes result;  // the whole result
        switch (what_.operation) {
            case Operation::all_reduce:
            case Operation::reduce:
            case Operation::reduce_scatter: {
                if (what_.operation == Operation::reduce && !root) break;
                std::vector<Bytes> inputs;
                std::vector<gradsync::Contribution> contributions;
                for (int r = 0; r < size_; ++r) {
                    inputs.push_back(what_.input(r, size_));
                    contributions.push_back(what_.contribution(r, size_));
                }
                result = reduce_by_hand(what_.dtype, what_.op, inputs, contributions);
                break;
            }
            case Operation::all_gather:
            case Operation::gather:
                if (what_.operation == Operation::gather && !root) break;
                for (int r = 0; r < size_; ++r) {
                    const gradsync::ElementRange range = gradsync::shard_range(what_.count, size_, r);
                    const std::size_t width = size_of(what_.dtype);
                    const Bytes shard = part(what_.input(r, size_), range.first * width, range.size() * width);
                    result.insert(result.end(), shard.begin(), shard.end());
                }
                break;
            case Operation::broadcast:
            case Operation::scatter: result = what_.input(what_.root, size_); break;
            case Operation::barrier: break;
        }
        const bool takes_shard = what_.operation == Operation::reduce_scatter || what_.operation == Operation::scatter;
        const ConstBytes expected = takes_shard ? ConstBytes(result).subspan(shard_first_, shard_) : result;
        const bool reads_only = (what_.operation == Operation::reduce || what_.operation == Operation::gather) && !root;
        const Bytes& first = first_.read();  // what a memory on a device makes for it lives as long
        const Bytes& second = second_.read();
        if (!reads_only) {
            const ConstBytes now = ConstBytes(two_ ? second : first).subspan(guard() + result_first_, expected.size());
            const bool to_the_bit = exact || !what_.reduces() || what_.selects() || what_.is_representable();
            const std::string wrong = difference(what_.dtype, now, expected, to_the_bit, size_);
            if (!wrong.empty()) return what_.describe() + ": " + wrong;
        }
        return untouched(first, second, reads_only ? 0 : expected.size());
    }

private:
    static std::ptrdiff_t offset(std::size_t bytes) { return static_cast<std::ptrdiff_t>(bytes); }
    static Bytes part(const Bytes& bytes, std::size_t first, std::size_t size) {
        return {bytes.begin() + offset(first), bytes.begin() + offset(first + size)};
    }
    /// Bytes before and after every buffer that nobody may write; not always a multiple of a cache line.
    std::size_t guard() const { return 64 + size_of(what_.dtype) * static_cast<std::size_t>(what_.seed % 5); }
    Bytes guarded(const Bytes& content) const {
        Bytes bytes(content.size() + 2 * guard(), std::byte{0x5a});
        std::copy(content.begin(), content.end(), bytes.begin() + offset(guard()));
        return bytes;
    }

    /// One buffer, in which the result stands at [first, first + size).
    void prepare(const Bytes& content, std::size_t first, std::size_t) {
        before_ = guarded(content);
        first_ = Memory(before_);
        result_first_ = first;
    }
    /// A buffer to read, another of `out_bytes` for the result.
    void prepare_two(const Bytes& in, std::size_t out_bytes) {
        prepare(in, 0, 0);
        two_ = true;
        before_second_ = guarded(Bytes(out_bytes, std::byte{0xc3}));
        second_ = Memory(before_second_);
    }

    /// Says if anything but the `written` bytes of the result has changed.
    std::string untouched(const Bytes& first, const Bytes& second, std::size_t written) const {
        const std::size_t from = guard() + result_first_, to = from + written;
        const auto changed = [&](const Bytes& before, const Bytes& now, bool holds_result) {
            if (!holds_result) return !same(before, now);
            return std::memcmp(before.data(), now.data(), from) != 0 ||
                   std::memcmp(before.data() + to, now.data() + to, before.size() - to) != 0;
        };
        if (changed(before_, first, !two_)) return what_.describe() + ": wrote into what it may only read";
        if (two_ && changed(before_second_, second, true)) return what_.describe() + ": wrote beside the result";
        return {};
    }

    Collective what_;
    int rank_;
    int size_;
    std::size_t shard_first_ = 0;  ///< bytes
    std::size_t shard_ = 0;
    std::size_t result_first_ = 0;
    bool two_ = false;
    Bytes before_, before_second_;
    Memory first_{Bytes()}, second_{Bytes()};
};

}  // namespace gradsync_test
