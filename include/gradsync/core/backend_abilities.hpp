// SPDX-License-Identifier: BSL-1.0
#pragma once

namespace gradsync::inline v0_2 {

/// The abilities that a backend has beyond the concept `Backend`. A backend states them in a static member:
///
///     static constexpr BackendAbilities abilities{.failed = true, .tags = true};
///
/// A misspelt name does not compile. `require_backend` rejects an ability that is stated without its members, and a
/// member that is there without being stated. A derived class inherits the abilities of its base.
struct BackendAbilities {
    /// `bool wants_progress_thread() const`: collectives advance only inside calls and take little CPU time, and any
    /// thread may make these calls. Overlap policies then poll from their own thread.
    bool progress_thread = false;
    /// `bool Work::poll()`: `test()` without a check of the time limit or of the other ranks,
    /// for callers that wait or test later.
    bool poll = false;
    /// `void Work::wait_on(stream)`: makes the stream that `stream()` returns wait for the collective, and returns at
    /// once. Otherwise the host waits.
    bool wait_on = false;
    /// `void use_own_stream()`: gives this communicator its own `stream()`. Its collectives then wait only for work
    /// that was ordered before that stream, such as another communicator's Work by `wait_on(stream())`. For exchanges
    /// in stages that do not block the host in between.
    bool own_stream = false;
    /// `bool failed() const`: true if the communicator has failed. For loops that wait for
    /// something other than a collective.
    bool failed = false;
    /// `void set_tag(CollectiveTag)` and `std::size_t next_owner()`: the ranks compare the tags of their collectives,
    /// see CollectiveTag.
    bool tags = false;
    /// `void check_reduces(DType) const`: throws the same error on all ranks if they cannot add up elements of that
    /// type. A Reducer asks at construction. Other backends add up every type.
    bool check_reduces = false;
    /// `std::size_t cheaper_alone_from(bool shared) const`: the number of bytes from which a gradient should
    /// travel from the trainer's memory in a collective of its own, because copies to `allocate`d memory and back
    /// would cost more. The same on all ranks. `shared`: all gradients of all ranks lie in memory for which
    /// `bool shares(BufferView) const` is true, where collectives are as fast as in `allocate`d memory.
    bool cheaper_alone = false;
    /// `bool steps_inside() const`: the same on all ranks, and if it is true,
    /// `reduce_step(in, out, op, contribution, step)` starts a reduction whose results are not stored:
    /// the rank that owns a shard (`shard_range`) gives them to its `ShardStep`, which writes what it makes of them
    /// to the `out` of all ranks. `in` and `out` have the same number of elements, each of any type, and are memory for
    /// which `bool shares(BufferView) const` is true on all ranks. `step` must live until the collective is complete.
    bool steps_inside = false;
    /// `double now() const`: this rank's time in seconds, if it is not the steady clock's. A simulation has one.
    bool clock = false;
    /// `group()` and `std::size_t group_bytes() const`: several small collectives are launched as one. Collectives that
    /// are started while the object that `group()` returns lives are launched together when it is destroyed, in the
    /// same order. Until then `test()` returns false, and a wait launches them early. A default-constructed object does
    /// nothing. All ranks form the same groups, of collectives that do not depend on one another. A Reducer groups
    /// buckets of the backward (and gathers of OverlapForward) that follow one another in the plan: at most 32, and at
    /// most `group_bytes()` bytes together, the same on all ranks.
    bool groups = false;
    /// For a backend whose memory is not the host's: `passes()` returns an object with the functions of DevicePasses
    /// (cuda/device_passes.hpp), which work in order on the compute stream `stream()`; `host()` returns the same ranks
    /// as a backend of host memory, for values that they agree on.
    bool device_passes = false;
};

/// The abilities that B states; none if it states nothing.
template <class B>
inline constexpr BackendAbilities abilities_of{};
template <class B>
    requires requires { B::abilities; }
inline constexpr BackendAbilities abilities_of<B> = B::abilities;

}  // namespace gradsync::inline v0_2
