// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// The library for trainers in C++14 or C++17: a Reducer over processes, without templates in its interface. This
/// header is plain C++14. Link gradsync::cxx14, which a C++20 compiler compiles once.

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/enums.hpp"

namespace gradsync {
inline namespace v0_2 {
namespace cxx14 {

using gradsync::DType;
using gradsync::Errc;

/// Every function below throws this. `what()` says what happened and what to do next.
class Error : public std::runtime_error {
public:
    /// Internal.
    Error(Errc code, const char* message, int rank, int peer)
        : std::runtime_error(message), code_(code), rank_(rank), peer_(peer) {}

    Errc errc() const noexcept { return code_; }  ///< the kind of failure
    int rank() const noexcept { return rank_; }   ///< the rank that throws; -1 if it is not known yet
    int peer() const noexcept { return peer_; }   ///< the rank that is to blame, if it is another one; otherwise -1

private:
    Errc code_;
    int rank_, peer_;
};

inline DType type_of(const float*) noexcept { return DType::f32; }  ///< The DType of what a pointer points to.
inline DType type_of(const double*) noexcept { return DType::f64; }
inline DType type_of(const std::int32_t*) noexcept { return DType::i32; }
inline DType type_of(const std::int64_t*) noexcept { return DType::i64; }

/// A rank's handle to its job. Ranks are processes. Copies are the same rank, and a move is a copy; destroying the last
/// copy, a Reducer's included, leaves the job. All functions but `rank`, `size`, `set_timeout` and `fail` are
/// collective: all ranks call them in the same order, with the same counts and types. They return when they are
/// complete. Use it from one thread at a time.
class Communicator {
public:
    /// Joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, or the variables of mpirun or srun; a
    /// program without any of them is a job of one rank. Ranks of one machine share memory; others are connected over
    /// TCP. MPI is not used. `timeout_seconds`: the limit of every wait, this one included.
    static Communicator from_environment(double timeout_seconds = 300);
    Communicator(const Communicator&) = default;  // without a move, which would leave a handle to nothing
    Communicator& operator=(const Communicator&) = default;

    int rank() const;                  ///< this rank
    int size() const;                  ///< the number of ranks
    void set_timeout(double seconds);  ///< the limit of later waits
    /// Makes every other rank's outstanding and later calls throw Errc::peer_failed with this reason, which may be
    /// null. Call it if the training cannot go on.
    void fail(const char* reason) noexcept;

    /// Replaces `count` elements by their mean over the ranks (floating types only),
    /// their sum, or rank `root`'s elements.
    void average(void* data, std::size_t count, DType type);
    void sum(void* data, std::size_t count, DType type);  ///< Replaces `count` elements by their sum over the ranks.
    void broadcast(void* data, std::size_t count, DType type, int root = 0);  ///< Replaces them by rank `root`'s.
    template <class T>
    void average(T* data, std::size_t count) {
        average(data, count, type_of(data));
    }
    template <class T>
    void sum(T* data, std::size_t count) {
        sum(data, count, type_of(data));
    }
    template <class T>
    void broadcast(T* data, std::size_t count, int root = 0) {
        broadcast(data, count, type_of(data), root);
    }

private:
    friend class Reducer;
    struct State;
    explicit Communicator(std::shared_ptr<State> state) : state_(std::move(state)) {}
    std::shared_ptr<State> state_;
};

/// One parameter: `count` weights and as many gradients. The trainer owns the memory, which must not move. `value` may
/// be null if the weights are not broadcast.
struct Parameter {
    const char* name;   ///< for error messages
    void* value;        ///< the weights, or null
    void* gradient;     ///< the gradients
    std::size_t count;  ///< elements of each
    DType type;         ///< of both
};
/// Makes a Parameter from typed pointers.
template <class T>
Parameter parameter(const char* name, T* value, T* gradient, std::size_t count) {
    return {name, value, gradient, count, type_of(value)};
}

/// Options of a Reducer; must be the same on all ranks.
struct Options {
    std::size_t bucket_bytes = std::size_t(25) << 20;       ///< limit of a bucket of gradients
    std::size_t first_bucket_bytes = std::size_t(1) << 20;  ///< limit of the first bucket, which starts early
    bool overlap = true;  ///< buckets travel during the backward; otherwise in `finish()`
    bool sum = false;     ///< `finish()` returns sums instead of means
};

/// Averages gradients as gradsync::Reducer does: mark each gradient when it is ready, then call `finish()`, and every
/// rank holds the mean. Collective: construction, `broadcast_parameters`, `begin_step`, `finish` and
/// `clip_gradients_by_norm`. Any thread may call `mark_ready`; call the rest from one thread at a time. After an
/// exception other than Errc::invalid_argument, the Reducer and its communicator are unusable.
///
/// To accumulate micro-batches, add them up in your gradients, and mark these in the last micro-batch only.
class Reducer {
public:
    /// `parameters`: in the order in which the forward uses them. Throws Errc::parameter_mismatch on every rank if
    /// parameters or options differ.
    Reducer(const Communicator& comm, const Parameter* parameters, std::size_t count,
            const Options& options = Options());
    Reducer(const Communicator& comm, const std::vector<Parameter>& parameters, const Options& options = Options())
        : Reducer(comm, parameters.data(), parameters.size(), options) {}
    Reducer(const Reducer&) = delete;
    Reducer& operator=(const Reducer&) = delete;

    void broadcast_parameters(int root = 0);  ///< gives every rank the root's weights
    /// For uneven inputs: says whether this rank has a batch, and returns whether any rank has one. A rank without one
    /// calls only `finish()`.
    bool begin_step(bool has_batch);
    void mark_ready(std::size_t i);               ///< gradient i is final; call it once a step, inside the backward
    void finish();                                ///< returns when every gradient holds the mean
    double clip_gradients_by_norm(double limit);  ///< after `finish()`; returns the norm before

private:
    struct State;
    std::shared_ptr<State> state_;
};

}  // namespace cxx14
}  // namespace v0_2
}  // namespace gradsync
