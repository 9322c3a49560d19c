// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/deal.hpp"
#include "../kernel/tables.hpp"

namespace gradsync::inline v0_2 {

class Observer;

/// The place of the trainer's gradients.
enum class GradientStorage : std::uint8_t {
    automatic,  ///< borrowed; with TorchReducer in_buckets where that copies less
    /// In the trainer's memory: copied into the bucket and out (no copy for a gradient that is alone in its bucket).
    borrowed,
    /// In `gradient_view(i)`: no copy. Register no gradients, or leave them where they are until the first `finish()`:
    /// in host memory, and without OverlapForward, it looks there if all averages are 0.
    in_buckets,
    /// Like in_buckets, but a bucket has memory only from the first `gradient_view` of a backward until it is reduced.
    /// For gradients that are reduced to shards (Zero2).
    pooled,
};

/// The result that `finish()` leaves in the gradients. x_r is rank r's gradient, w_r its `set_weight`.
enum class Averaging : std::uint8_t {
    mean,             ///< sum x_r / number of ranks, or of micro-batches if the options count them
    sum,              ///< sum x_r
    weighted_mean,    ///< sum w_r x_r / sum w_r: local means over w_r samples or tokens
    mean_over_count,  ///< sum x_r / sum w_r: local sums over w_r samples, tokens or micro-batches
};

/// The place where gradients of micro-batches under `no_sync()` add up.
enum class Accumulation : std::uint8_t {
    in_gradients,  ///< in the trainer's gradients, by the trainer (as in PyTorch)
    /// In the buckets, by the reducer: each micro-batch overwrites its gradients and marks them. Low precision adds up
    /// in f32; with a `reduce_dtype` of 16 or 8 bits in f32 beside the bucket, rounded once at the end of the step. If
    /// `micro_batches` gives their number, they add up in the order of the tree of sums; otherwise one after the other,
    /// and for borrowed gradients only.
    in_buckets,
};

/// How `finish()` treats a parameter that got no gradient.
enum class UnusedParameters : std::uint8_t {
    error,  ///< throws an error that names it, on every rank
    /// The ranks agree on which of them used each gradient. A gradient that no rank used stays untouched; otherwise
    /// ranks without one contribute zeros. Costs one small collective per step.
    find_unused,
};

/// The divisor of a mean while some ranks have run out of data (`begin_step(false)`).
enum class JoinDivisor : std::uint8_t {
    live_ranks,  ///< the ranks that still have data
    all_ranks,   ///< the world size
};

/// What happens if a gradient has an element that is infinite or NaN, which the mean would spread to all ranks. Except
/// with `pass`, each mark reads its gradient, which must be in host memory.
enum class NonFinite : std::uint8_t {
    pass,  ///< nothing: gradients are not read
    /// Throws an error that names rank and parameter, before the gradient leaves; the other ranks' errors repeat it.
    error,
    /// The ranks agree to skip the step: `finish()` leaves gradients of 0 and sets `statistics().last.skipped` to 1;
    /// the trainer must then skip its optimizer step. Costs one small collective per step. Only with AllReduce.
    skip,
};

/// Value of ReducerOptions::compare_weights_every: do not compare.
inline constexpr std::size_t never = static_cast<std::size_t>(-1);

/// A DType or none. A program that constructs one from a constant compiles the loops of that type only. If the type is
/// no constant, or the compiler does not optimise, it compiles the loops of all types.
class OptionalDType {
public:
    constexpr OptionalDType() = default;
    /// Holds a type.
    template <std::same_as<DType> T>
    constexpr OptionalDType(T type) noexcept : type_(type), register_(kernel::registration_of(type)) {}

    constexpr bool has_value() const noexcept { return register_ != nullptr; }  ///< Returns whether it holds a type.
    constexpr explicit operator bool() const noexcept { return has_value(); }
    constexpr DType operator*() const noexcept { return type_; }  ///< Returns the type.
    /// Lets backends of this program reduce the type. Separate from the constructor, which does not run for a constant.
    void register_kernels() const noexcept {
        if (has_value()) register_();
    }
    friend constexpr bool operator==(OptionalDType, OptionalDType) = default;

private:
    DType type_ = DType::f32;
    void (*register_)() noexcept = nullptr;
};

/// Settings of a Reducer. Except `check_writes` and `observer`, they must be equal on all
/// ranks; construction compares them.
struct ReducerOptions {
    GradientStorage gradients = GradientStorage::automatic;  ///< where gradients live
    Averaging averaging = Averaging::mean;                   ///< what `finish()` leaves in them
    Accumulation accumulation = Accumulation::in_gradients;  ///< where micro-batches under `no_sync()` add up
    /// The number V of micro-batches of a step, over all n ranks, if the reducer adds them up; at least n. Whole
    /// gradients also need Accumulation::in_buckets, unless V = n, because each micro-batch must overwrite them.
    /// Sharded ones need no other option. `Deal` says which of them each rank computes, the last one outside
    /// `no_sync()`. They are the leaves of one tree of sums: a rank adds up its part, the ranks the rest. So V
    /// micro-batches give the same bits on every number of ranks. Averaging::mean divides by V. The sums take up to
    /// log2(V / n) copies of the gradients (one less for borrowed ones, unless `reduce_dtype` has fewer than 32 bits),
    /// in f32 if gradients have 16 or 8 bits.
    ///
    /// If V / n is a power of two, each rank sends one sum. Otherwise it sends one for each 1 in the binary
    /// form of V / n, and one for a left-over micro-batch: k sums are k times the bytes, and up to k - 1 more
    /// copies of the gradients. Weighted averages do not work then. In device memory, and with compressors,
    /// each rank always sends one sum, and the bits depend on the number of ranks.
    ///
    /// If gradients are sharded (pooled), each `finish()` adds up one micro-batch of each rank. The bits are those of
    /// whole gradients if gradients are f32 or f64.
    std::size_t micro_batches = 0;
    UnusedParameters unused = UnusedParameters::error;  ///< what happens to parameters without a gradient
    JoinDivisor divisor = JoinDivisor::live_ranks;      ///< what a mean is divided by while some ranks have no data
    NonFinite non_finite = NonFinite::pass;             ///< what happens to gradients that are infinite or NaN
    /// The type in which borrowed and pooled floating-point gradients travel. Default: their own,
    /// or f32 for low precision that the reducer adds up. Pooled gradients of another type take memory
    /// for both while a bucket is filled.
    OptionalDType reduce_dtype = {};
    /// Compares the weights of all ranks in the first `finish()`, and then every so many steps. Throws
    /// Error(parameter_mismatch) if they differ, because averages do not make them equal again. 0: only in the first.
    /// `never`: for weights that differ on purpose. Reads all weights that parameters name, once. Those that live with
    /// the library (sharded training) are compared once only.
    std::size_t compare_weights_every = 0;
    /// For debugging: takes a checksum of each gradient at its mark, and compares it when the bucket is full
    /// and in `finish()`, which throws Error(invalid_argument) with the parameter's name if the gradient was
    /// written in between. No bucket is launched before `finish()`, so there is no overlap; the bits are the same.
    /// Each rank decides for itself; `GRADSYNC_CHECKS=1` in the environment turns it on everywhere.
    /// It sees writes to gradients in host memory up to the call of `finish()`. It does not see micro-batches under
    /// `no_sync()`, gradients with fewer marks than `uses`, and pooled buckets that leave early to make room.
    /// Device memory is refused. Sharded classes notice every write between `finish()` and `step()`, too.
    /// Ranks with several Reducers must finish them in the same order.
    bool check_writes = false;
    /// Receives events, for a trace (observe/timeline.hpp) or a profiler; must outlive the Reducer.
    /// Each rank has its own, or none.
    Observer* observer = nullptr;
};

/// All settings that ranks have in common, in one line. The ranks compare it.
inline std::string describe(const ReducerOptions& options) {
    using detail::name_in;
    return detail::text(
        "gradients=", name_in({"automatic", "borrowed", "in_buckets", "pooled"}, options.gradients),
        " averaging=", name_in({"mean", "sum", "weighted_mean", "mean_over_count"}, options.averaging),
        " accumulation=", name_in({"in_gradients", "in_buckets"}, options.accumulation),
        " micro_batches=", options.micro_batches, " unused=", name_in({"error", "find_unused"}, options.unused),
        " divisor=", name_in({"live_ranks", "all_ranks"}, options.divisor),
        " non_finite=", name_in({"pass", "error", "skip"}, options.non_finite),
        " reduce_dtype=", options.reduce_dtype ? name_of(*options.reduce_dtype) : "own", " compare_weights_every=",
        options.compare_weights_every == never ? "never" : detail::text(options.compare_weights_every));
}

namespace detail {

/// These options, with `storage` in place of GradientStorage::automatic.
constexpr ReducerOptions with_storage(ReducerOptions options, GradientStorage storage) noexcept {
    if (options.gradients == GradientStorage::automatic) options.gradients = storage;
    return options;
}

/// Does the averaging need a weight in each step?
constexpr bool is_weighted(Averaging averaging) noexcept {
    return averaging == Averaging::weighted_mean || averaging == Averaging::mean_over_count;
}

/// The deal of a step's micro-batches to `size` ranks. Without `ReducerOptions::micro_batches` it has none.
constexpr Deal deal_of(const ReducerOptions& options, int size) noexcept {
    return {options.micro_batches, size, options.gradients == GradientStorage::pooled};
}

/// Do the ranks reduce several sums of the tree per step instead of one? `options`: with their storage.
constexpr bool has_several_sums(const ReducerOptions& options, int size) noexcept {
    const Deal deal = deal_of(options, size);
    if (size == 1 || deal.rounds() <= 1) return false;
    if (!deal.sharded_gradients && options.reduce_dtype && is_low_precision(*options.reduce_dtype))
        return false;  // each would be rounded
    return !deal.sharded_gradients || deal.count(0) != deal.count(size - 1) ||
           !std::has_single_bit(static_cast<unsigned>(size));
}

/// The divisor of the sums that travel if shards add them up; 0 if they do not.
/// A mean over `size` ranks may fit into a type of low precision where the sum does not. It is a power of two:
/// only sums that it makes subnormal lose bits, as the mean would.
constexpr double sum_divisor(const ReducerOptions& options, DType dtype, int size) noexcept {
    if (options.gradients != GradientStorage::pooled || options.micro_batches == 0) return 0;
    return is_low_precision(dtype) && options.averaging == Averaging::mean
               ? static_cast<double>(std::bit_ceil(static_cast<unsigned>(size)))
               : 1;
}

/// This rank's contribution to the means of a step: every kind of averaging is a mean with the right scales
/// and weights. `weight`: the argument of `set_weight`; `has_batch`: that of `begin_step`; `count`: micro-batches
/// of this rank. `divisor`: not 0 if several sums are added up afterwards, and the total is scaled;
/// the sums travel divided by it.
constexpr Contribution contribution_of(const ReducerOptions& options, int rank, double weight, bool has_batch,
                                       double count = 1, double divisor = 0) noexcept {
    switch (divisor != 0 ? Averaging::sum : options.averaging) {
        case Averaging::mean:
            return has_batch ? Contribution{1, count}
                             : Contribution{0, options.divisor == JoinDivisor::all_ranks ? count : 0.0};
        // A sum is a mean whose weights add up to 1.
        case Averaging::sum: return {has_batch ? 1.0 : 0.0, rank == 0 ? larger(divisor, 1.0) : 0.0};
        case Averaging::weighted_mean: return has_batch ? Contribution{weight, weight} : Contribution{0, 0};
        case Averaging::mean_over_count: return has_batch ? Contribution{1, weight} : Contribution{0, 0};
    }
    return {};
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
