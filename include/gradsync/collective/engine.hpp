// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
#include "call.hpp"
#include "deadline.hpp"
#include "world.hpp"

namespace gradsync::inline v0_2::collective {

/// Memory that an engine has made; shared ownership, freed with the last copy.
class Memory {
public:
    Memory() = default;
    explicit Memory(std::shared_ptr<void> memory) noexcept : memory_(std::move(memory)) {}
    void* data() const noexcept { return memory_.get(); }

    /// Wraps a buffer that has a `data()`, and owns it.
    template <class Buffer>
    static Memory of(Buffer buffer) {
        auto kept = std::make_shared<Buffer>(std::move(buffer));
        void* const data = kept->data();
        return Memory(std::shared_ptr<void>(std::move(kept), data));
    }

private:
    std::shared_ptr<void> memory_;
};

/// The new communicator of one rank after a split.
struct Group {
    std::size_t split = 0;  ///< number of the split on the parent, the same on all of its ranks
    int color = 0;
    std::vector<int> members = {};  ///< the parent's ranks, in their new order
    int rank = 0;                   ///< this rank's place among them
};

/// One rank's side of a communicator, for backends that choose at run time how its ranks reach one another.
///
/// - `start` begins this rank's next collective and returns its number, counted from 0.
/// - `test` makes progress and says whether the collective is complete. Throws Error if the world has failed.
/// - `wait` returns when it is complete. Throws Error if the world has failed, or the time limit is reached.
/// - `abandon` says that no one will wait for it.
/// - `fail` ends the world; it returns once no other rank touches this rank's buffers.
///
/// The rest is as in the concept Backend.
class Engine {
public:
    Engine() = default;
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    virtual ~Engine() = default;

    virtual int rank() const noexcept = 0;
    virtual int size() const noexcept = 0;
    virtual int world_rank(int rank) const noexcept = 0;
    virtual World& world() const noexcept = 0;

    virtual std::uint64_t start(const Call& call) = 0;
    virtual bool test(std::uint64_t number) = 0;
    virtual void wait(std::uint64_t number) = 0;
    /// For repeated tests: ends the world if `deadline`, which began with the first look, says that the time limit is reached, or if a rank
    /// that is waited for has left or died.
    virtual void look(std::uint64_t number, Deadline& deadline) = 0;
    virtual void abandon(std::uint64_t number) noexcept = 0;
    virtual void fail(const Failure& failure) noexcept = 0;
    virtual void progress() noexcept = 0;
    virtual std::chrono::nanoseconds progress_time() const noexcept = 0;

    virtual std::chrono::nanoseconds timeout() const noexcept = 0;
    virtual void set_timeout(std::chrono::nanoseconds limit) noexcept = 0;

    /// Returns a number for a split, or for another object that all ranks make at the same place in the program.
    virtual std::size_t next_number() noexcept = 0;
    /// Collective over all ranks; each passes its own group.
    virtual std::shared_ptr<Engine> split(const Group& group) = 0;
    /// Returns memory in which collectives are fastest, zeroed and aligned to at least 64 bytes. Collective.
    virtual Memory allocate(std::size_t bytes) = 0;

    /// Explains a communicator that is slower than it could be: ", but ...", or empty.
    virtual std::string remark() const { return {}; }

    /// Returns `own` of all ranks, by rank. Collective.
    template <class T>
        requires std::is_trivially_copyable_v<T>
    std::vector<T> exchange(const T& own) {
        std::vector<T> all(static_cast<std::size_t>(size()));
        Call call;
        call.operation = Operation::all_gather;
        call.in = &own;
        call.out = all.data();
        call.in_count = sizeof(T);
        call.out_count = all.size() * sizeof(T);
        call.dtype = DType::u8;
        wait(start(call));
        return all;
    }
};

}  // namespace gradsync::inline v0_2::collective
