// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "bucket_storage.hpp"
#include "parameters.hpp"
#include "policies.hpp"
#include "verification.hpp"

namespace gradsync::inline v0_2::detail {

/// The gradients, and their way into and out of the buckets. The engine decides when. `add_up`, `deposit` and `rebind`
/// may run concurrently for different gradients; `marked_bucket` for one bucket at a time.
template <Backend B>
class GradientHome {
public:
    /// Plans the buckets without allocating them. `policy` outlives this. Throws Error if parameters, options and
    /// policy do not fit together.
    [[gnu::cold]] GradientHome(B& backend, List<ParameterView> parameters, const ReducerOptions& options,
                               const AnyBuckets& policy, const Policies<B>& policies)
        : options_(options),
          halves_(policies.exchange->traits.scatters),
          scattered_(halves_ && !policies.decoupled),
          means_only_(policies.exchange->traits.means_only),
          size_(backend.size()),
          rank_(backend.rank()),
          policy_(policy),
          parameters_(std::move(parameters)),
          infos_(infos_for(backend, policies.packs)),
          plan_(make_plan(backend)),
          dealt_(deal_of(options_, size_),
                 policies.sums && B::memory_space == MemorySpace::host && has_several_sums(options_, size_)),
          shards_(backend, options_),
          sums_(backend, parameters_.size(), place_of_sums(), dealt_.deal(), dealt_.several() && !pooled()),
          passes_(passes_of(backend)) {
        if (!pooled() && dealt_.several()) additions_ = dealt_.needs().additions;
    }

    /// Allocates the buckets. Call it first, once all ranks are known to have the same plan. Collective.
    [[gnu::cold]] void allocate(B& backend) {
        storage_ = make_storage(backend);
        allocate_shards(backend);
        if (sums_.apart()) {
            for (std::size_t place = 0; place < sums_.places(); ++place)
                for (std::size_t i = 0; i < parameters_.size(); ++i)
                    sums_apart_.push_back(typed_view(nullptr, infos_[i].count, accumulator_of(infos_[i].dtype)));
            apart_bytes_ = allocate_lines(backend, sums_apart_, apart_memory_);
        }
        prepare();
    }

    const List<ParameterView>& parameters() const noexcept { return parameters_; }
    const ParameterView& parameter(std::size_t i) const noexcept { return parameters_[i]; }
    /// The trainable parameters, in the order in which their gradients are expected to become ready.
    std::span<const std::size_t> order() const noexcept { return order_; }
    const BucketPlan& plan() const noexcept { return plan_; }

    const List<ParameterInfo>& infos() const noexcept { return infos_; }
    const BucketLayout& layout() const noexcept { return storage_.layout(); }
    /// Bytes of memory that the library owns.
    std::size_t bytes() const noexcept { return storage_.bytes() + apart_bytes_ + shards_.bytes(); }

    /// The memory of bucket b, for collectives.
    BufferView bucket(std::size_t b) const noexcept { return storage_.bucket(b); }

    /// The memory in which the trainer finds gradient i.
    BufferView gradient(std::size_t i) const noexcept {
        return live_here() && parameters_[i].requires_grad ? storage_.written(i) : parameters_[i].gradient;
    }

    // ---------------------------------------------------------------------------- gradients that are reduced to shards

    /// This rank's shard of bucket b, once its collective is complete.
    BufferView shard(std::size_t b) const noexcept { return pooled() ? shards_[b] : own_part(b); }

    /// Do buckets have memory only while they need it? If so, call `obtain` before writing a gradient, and `land` after
    /// the collective of its bucket.
    bool pooled() const noexcept { return options_.gradients == GradientStorage::pooled; }
    /// Records that the trainer asked for gradient i, which has memory.
    void ask_for(std::size_t i) noexcept {
        std::lock_guard lock(slots_);
        asked_for_[i] = 1;
    }
    /// Did the trainer ask for gradient i in this backward?
    bool was_asked_for(std::size_t i) noexcept {
        std::lock_guard lock(slots_);
        return asked_for_[i] != 0;
    }
    /// Gives bucket b a slot; false if it should wait for one. With `more` it takes any, or in host
    /// memory adds one. For any thread.
    bool obtain(std::size_t b, bool more = false) {
        std::lock_guard lock(slots_);
        if (storage_.has_slot(b) ||
            storage_.take_slot(b, plan_.bucket(b), !more && B::memory_space != MemorySpace::host))
            return true;
        if constexpr (B::memory_space == MemorySpace::host)
            if (more) return storage_.add_slot(b, plan_.bucket(b)), true;
        return false;
    }
    /// Call when bucket b is reduced. Adds up its sums, if there are several. Pooled gradients: adds to this rank's
    /// shard and frees the slot.
    void land(std::size_t b) {
        if (!pooled()) {
            if (dealt_.several()) add_up_sums(b);
            return;
        }
        if (dealt_.deal().micro_batches == 0) shards_.add(b, own_part(b), 0);
        for (std::size_t k = 0; k < dealt_.now().size(); ++k) shards_.add(b, result(b, k), dealt_.now()[k].leaves);
        std::lock_guard lock(slots_);
        for (std::size_t i : plan_.bucket(b)) asked_for_[i] = 0;
        if (storage_.bucket(b).data != nullptr) storage_.return_slot(b, plan_.bucket(b));
    }
    /// The sums of the ranks' micro-batches that are reduced together. If a step has
    /// several, each is reduced separately.
    const DealtSums& dealt() const noexcept { return dealt_; }
    /// Ends a round of micro-batches, one per rank. With `ends_step` the step is over,
    /// and its shards are no longer needed.
    void end_round(bool ends_step) {
        if (ends_step) shards_.forget();
        dealt_.set_round(ends_step ? 0 : dealt_.round() + 1);
    }
    /// Does this rank contribute to the sum?
    bool has_part(const DealtSum& sum) const noexcept { return sum.first <= rank_ && rank_ < sum.last; }
    /// The memory of bucket b in which sum k of the current ones is reduced. It holds this rank's
    /// contribution, if it has one.
    BufferView sum(std::size_t b, std::size_t k) const noexcept {
        const BufferView bucket = storage_.bucket(b);
        if (pooled()) return bucket;
        const ListView<const DealtSum> now = dealt_.now();
        // Sums of other ranks use spare memory, except the first of a round without a sum of this rank.
        std::size_t spare = 0;
        const auto has_spare = [&](std::size_t i) {
            const bool is_first = i == 0 || now[i - 1].round != now[i].round, has_root = now[i].round < sums_.roots();
            return !has_part(now[i]) && (!is_first || has_root);
        };
        if (!has_spare(k)) return sums_.root(now[k].round, storage_.image(bucket, sums_.in_place() ? 1 : 0), bucket);
        for (std::size_t i = 0; i < k; ++i) spare += std::size_t{has_spare(i)};
        return storage_.image(bucket, images() - spares() + spare);
    }
    /// The memory of the result of sum k: the whole bucket, or this rank's shard.
    BufferView result(std::size_t b, std::size_t k) const noexcept {
        if (pooled() && dealt_.now().size() > 1) return shards_.part(k, b);
        return halves_ ? shard_of(sum(b, k), size_, rank_) : sum(b, k);
    }
    bool halves() const noexcept { return halves_; }  ///< Does the exchange end with this rank's shards?
    void set_value(std::size_t i, BufferView value) noexcept { parameters_[i].value = value; }  ///< to be compared

    /// Must gradient i be copied into its bucket?
    bool is_copied(std::size_t i) const noexcept { return marks_[i].copied; }
    /// Must a mark of gradient i `deposit` it?
    bool is_deposited(std::size_t i) const noexcept { return marks_[i].copied || sums_.in_place(); }
    std::size_t bytes_of(std::size_t i) const noexcept { return marks_[i].gradient.bytes(); }
    /// The sums of earlier micro-batches of this step.
    MicroBatchSums<B>& sums() noexcept { return sums_; }
    const MicroBatchSums<B>& sums() const noexcept { return sums_; }
    /// Adds gradient i to the sums of its micro-batches. More micro-batches follow.
    [[gnu::noinline]] void add_up(std::size_t i) { sums_.add(i, gradient(i), first_sum(i)); }

    /// Puts the complete gradient i into its bucket, together with the sums of earlier micro-batches.
    GRADSYNC_ALWAYS_INLINE void deposit(std::size_t i) {  // called by a mark; see Readiness
        if (sums_.holds(i) || sums_.leaves_roots()) deposit_sum(i, gradient(i));
        else if (marks_[i].copied)
            passes_.copy(pooled() ? storage_.written(i) : marks_[i].gradient, storage_.parameter(i));
    }
    /// The same with the gradient of the last micro-batch, or with {} if the last one did not use it.
    [[gnu::noinline]] void deposit_sum(std::size_t i, BufferView last) {
        sums_.add_last(i, last, first_sum(i), storage_.parameter(i));
    }

    /// Zeroes gradient i in its bucket, because this rank contributes nothing.
    [[gnu::noinline]] void clear(std::size_t i) {
        for (std::size_t image = 0; image < images(); ++image)
            passes_.clear(storage_.image(storage_.parameter(i), image));
    }
    /// The same for all of bucket b.
    void clear_bucket(std::size_t b) { passes_.clear(storage_.bucket(b)); }

    /// Copies the results of bucket b to the trainer's gradients i for which `wanted(i)`.
    template <class Wanted>
    void hand_out(std::size_t b, Wanted&& wanted) {
        for (std::size_t i : plan_.bucket(b))
            if (is_copied(i) && wanted(i)) passes_.copy(storage_.parameter(i), marks_[i].gradient);
    }

    /// Writes a NaN to the first element of each gradient that will receive results of bucket b, so that nobody trains
    /// on stale contents. In host memory only.
    void spoil(std::size_t b) noexcept {
        if constexpr (B::memory_space == MemorySpace::host)
            for (std::size_t i : plan_.bucket(b))
                if (const BufferView g = parameters_[i].gradient; is_copied(i) && g.count != 0 && is_floating(g.dtype))
                    std::memset(g.data, 0xff, size_of(g.dtype));  // a NaN in each of the types
    }

    /// Saves gradient i, if it lives in its bucket, in case no rank uses it.
    void keep(std::size_t i) {
        if (!live_here() || scattered_) return;
        const BufferView slot = storage_.parameter(i);
        const std::size_t end = kept_bytes_.size();
        kept_.push_back(i);
        kept_bytes_.resize(end + slot.bytes());
        passes_.read(slot, kept_bytes_.data() + end);
    }
    /// Restores the saved gradients i for which `unused(i)`.
    template <class Unused>
    void restore(Unused&& unused) {
        const std::uint8_t* bytes = kept_bytes_.data();
        for (std::size_t i : kept_) {
            const BufferView slot = storage_.parameter(i);
            if (unused(i)) passes_.write(bytes, slot);
            bytes += slot.bytes();
        }
        kept_.clear();
        kept_bytes_.clear();
    }

    /// Plans for another order of readiness, and moves values and sums along. Returns true
    /// if the plan changed. Collective.
    [[gnu::cold]] bool reorder(B& backend, std::span<const std::uint64_t> order) {
        for (std::size_t k = 0; k < order_.size(); ++k) order_[k] = order[k];
        BucketPlan plan = make_plan(backend);
        if (plan == plan_) return false;
        plan_ = std::move(plan);
        BucketStorage<B> storage = make_storage(backend);
        for (std::size_t i : order_)
            // Borrowed gradients stay in the trainer's memory: their buckets hold only sums of micro-batches.
            for (std::size_t k = 0; !pooled() && (live_here() || sums_.holds(i)) && k < images(); ++k)
                passes_.copy(storage_.image(storage_.parameter(i), k), storage.image(storage.parameter(i), k));
        storage_ = std::move(storage);
        allocate_shards(backend);
        prepare();
        return true;
    }

    /// Moves the borrowed gradient i, in bucket b, to another memory. Returns false if it cannot
    /// leave an arena of device memory.
    [[nodiscard]] bool rebind(std::size_t i, std::size_t b, BufferView gradient) {
        const bool direct = parameters_[i].requires_grad && !marks_[i].copied,
                   leaves = direct && plan_.bucket(b).size() > 1;
        if (leaves && B::memory_space != MemorySpace::host) return false;
        parameters_[i].gradient = gradient;
        if (leaves) return some_left_.store(true, std::memory_order_relaxed), true;
        if (direct) storage_.rebind(b, i, gradient);
        marks_[i] = mark_of(i);
        return true;
    }
    /// The memory of bucket b, all of which is marked. If gradients have left the range of the trainer's memory that
    /// the bucket was, they are copied to memory of its own.
    BufferView marked_bucket(std::size_t b) {
        if (some_left_.load(std::memory_order_relaxed)) move_out(b);
        return bucket(b);
    }

private:
    /// The part of a parameter that each step reads. Kept together, so that a step touches little memory.
    struct Mark {
        BufferView gradient;  ///< of the trainer
        bool copied;
    };
    Mark mark_of(std::size_t i) const noexcept {
        const BufferView gradient = parameters_[i].gradient;
        return {gradient, live_here() ? storage_.parameter(i).dtype != storage_.written(i).dtype
                                      : storage_.parameter(i).data != gradient.data};
    }
    [[gnu::cold, gnu::noinline]] void move_out(std::size_t b) {
        const std::span<const std::size_t> all = plan_.bucket(b);
        bool left = false;
        for (const std::size_t i : all) left = left || (!marks_[i].copied && mark_of(i).copied);
        if (!left) return;
        if constexpr (B::memory_space == MemorySpace::host) storage_.detach(b, all);
        for (const std::size_t i : all) marks_[i] = mark_of(i), deposit(i);
    }
    [[gnu::cold]] void prepare() {
        sums_.set_stride(sums_.apart() ? apart_bytes_ / sums_.places() : storage_.image_bytes());
        marks_.resize(parameters_.size());
        for (std::size_t i = 0; i < parameters_.size(); ++i) marks_[i] = mark_of(i);
    }

    using Place = typename MicroBatchSums<B>::Place;
    Place place_of_sums() const noexcept {
        if (options_.accumulation != Accumulation::in_buckets || pooled()) return Place::none;
        if (live_here()) return Place::gradient;
        return options_.reduce_dtype && is_low_precision(*options_.reduce_dtype) ? Place::apart : Place::slot;
    }
    /// Place 0 of the sums of gradient i.
    BufferView first_sum(std::size_t i) const noexcept {
        return sums_.apart() ? sums_apart_[i] : storage_.image(storage_.parameter(i), sums_.in_place() ? 1 : 0);
    }
    /// The number of copies of each bucket's memory; more than one if sums of micro-batches have the slot's type.
    std::size_t images() const noexcept {
        return spares() + (sums_.apart() ? 1 : larger<std::size_t>(1, sums_.places() + (sums_.in_place() ? 1 : 0)));
    }
    std::size_t spares() const noexcept {
        return sums_.leaves_roots() ? dealt_.now().size() - dealt_.deal().rounds() : 0;
    }
    /// Adds up the sums of bucket b.
    [[gnu::cold, gnu::noinline]] void add_up_sums(std::size_t b) {
        inputs_.resize(additions_.size());
        for (std::size_t k = 0; k < inputs_.size(); ++k) inputs_[k] = result(b, k).data;
        const BufferView to = halves_ ? own_part(b) : storage_.bucket(b);
        const double factor =
            options_.averaging == Averaging::mean ? 1.0 / static_cast<double>(options_.micro_batches) : 1;
        kernel::reduce({inputs_, {}, {&to.data, 1}, to.count, to.dtype, ReduceOp::sum, factor, additions_});
    }
    [[gnu::cold]] void allocate_shards(B& backend) {
        if (pooled()) shards_.allocate(backend, storage_, plan_.size(), dealt_);
    }

    bool live_here() const noexcept { return options_.gradients != GradientStorage::borrowed; }

    BufferView own_part(std::size_t b) const noexcept { return shard_of(storage_.bucket(b), size_, rank_); }

    [[gnu::cold]] List<ParameterInfo> infos_for([[maybe_unused]] B& backend, [[maybe_unused]] bool packed) {
        List<ParameterInfo> infos = bucket_infos(parameters_, options_, B::memory_space, scattered_, rank_, size_);
        if constexpr (abilities_of<B>.cheaper_alone) {
            if (size_ == 1) return infos;
            std::uint64_t shared = 1;  // compared whatever the options say: they may differ between ranks
            for (const ParameterView& p : parameters_)
                shared = shared && (!p.requires_grad || p.gradient.count == 0 || backend.shares(p.gradient));
            for (const std::uint64_t all : gather_values(backend, {&shared, 1})) shared = shared && all;
            least_direct_ = shared != 0 ? 0 : backend.cheaper_alone_from(false);
            if (!packed)
                choose_alone(infos, backend.cheaper_alone_from(shared != 0),
                             [&](auto&&... x) { return may_be_direct(x...); });
        }
        return infos;
    }

    [[gnu::cold]] BucketPlan make_plan(const B& backend) const {
        BucketPlan plan;
        // One rank sends nothing. With one bucket per gradient, borrowed gradients are not even copied.
        if (backend.size() == 1 && !live_here()) {
            for (const std::size_t& i : order_) plan.push_back({&i, 1});
            return plan;
        }
        plan = policy_.plan(infos_, order_);
        check_plan(plan, infos_, parameters_, policy_.describe(), backend.rank());
        if (debugs()) debug_plan(plan, infos_, parameters_, policy_.describe(), backend.rank());
        return plan;
    }

    /// By bucket: the range of the trainer's memory that is this bucket on all ranks; without memory
    /// if there is none. Collective.
    [[gnu::cold]] List<BufferView> direct_buckets(B& backend) const {
        List<BufferView> ranges(plan_.size());
        List<std::uint64_t> places(plan_.size());  // by bucket: digest of the positions of its gradients in the range
        bool several = false;
        for (std::size_t b = 0; b < plan_.size(); ++b) {
            const std::span<const std::size_t> bucket = plan_.bucket(b);
            // Groups with replicas must lay out buckets alike, but each sees only its own memory.
            bool direct = !means_only_ || bucket.size() == 1;
            const void* const arena = parameters_[bucket.front()].arena;
            // A bucket of several gradients in device memory cannot be detached, so gradients that are adjacent by
            // chance do not form one.
            const bool by_chance = B::memory_space != MemorySpace::host && bucket.size() > 1 && arena == nullptr;
            for (const std::size_t i : bucket)
                direct = direct && !by_chance && parameters_[i].arena == arena && may_be_direct(i, infos_[i]);
            if (!direct) continue;
            several = several || bucket.size() > 1;
            ranges[b] = range_of(bucket, [&](std::size_t i) { return parameters_[i].gradient; });
            Digest digest;
            if (bucket.size() > 1 && ranges[b].bytes() < least_direct_) ranges[b] = {};
            if (ranges[b].data == nullptr) continue;
            for (const std::size_t i : bucket) digest.add(std::uint64_t{distance(ranges[b], parameters_[i].gradient)});
            places[b] = digest.value();
        }
        if (!several || size_ == 1) return ranges;
        const List<std::uint64_t> all = gather_values(host_of(backend), places);
        for (std::size_t k = 0; k < all.size(); ++k)
            if (const std::size_t b = k % plan_.size(); all[k] != places[b]) ranges[b] = {};
        return ranges;
    }
    /// May a bucket use the memory of gradient i directly?
    bool may_be_direct(std::size_t i, const ParameterInfo& info) const {
        return parameters_[i].requires_grad && !live_here() && options_.unused == UnusedParameters::error &&
               options_.accumulation == Accumulation::in_gradients && info.dtype == parameters_[i].gradient.dtype;
    }

    [[gnu::cold]] BucketStorage<B> make_storage(B& backend) const {
        if (pooled()) {
            const bool unused =
                B::memory_space != MemorySpace::host && options_.unused == UnusedParameters::find_unused;
            return BucketStorage<B>::with_slots(backend, plan_, infos_, parameters_,
                                                slots_needed(plan_, parameters_, order_, unused));
        }
        const List<BufferView> direct = direct_buckets(backend);
        std::size_t count = 0;
        for (const BufferView& range : direct) count += range.data != nullptr;
        debug(DebugLevel::info, rank_, count, " of ", plan_.size(),
              " buckets are the trainer's own memory; the others have memory of the library");
        return BucketStorage<B>::with_memory(backend, plan_, infos_, parameters_, direct, images());
    }

    ReducerOptions options_;
    bool halves_;      ///< see `halves()`
    bool scattered_;   ///< only the shards are used once a bucket's collective is complete
    bool means_only_;  ///< see ExchangeTraits
    int size_, rank_;
    /// Bytes from which a range of several gradients in the trainer's memory is used as a bucket.
    std::size_t least_direct_ = 0;
    const AnyBuckets& policy_;
    List<ParameterView> parameters_;
    List<ParameterInfo> infos_;
    List<std::size_t> order_ = default_order(parameters_);
    BucketPlan plan_;
    BucketStorage<B> storage_;
    std::mutex slots_;
    DealtSums dealt_;
    List<std::uint8_t> additions_;  ///< by sum, if there are several: see kernel::Reduction::sums
    List<const void*> inputs_;
    GradientShards<B> shards_;  ///< if gradients are pooled
    MicroBatchSums<B> sums_;
    decltype(std::declval<B&>().allocate(std::size_t{})) apart_memory_{};
    std::size_t apart_bytes_ = 0;
    List<BufferView> sums_apart_;  ///< by place and parameter
    [[no_unique_address]] PassesOf<B> passes_;
    List<Mark> marks_;                    ///< by parameter
    std::atomic<bool> some_left_{false};  ///< some gradients have left the range that was their bucket; see `rebind`
    /// By parameter, in this backward; for pooled gradients.
    List<std::uint8_t> asked_for_ = List<std::uint8_t>(parameters_.size());
    List<std::size_t> kept_;         ///< saved gradients, in case no rank used them
    List<std::uint8_t> kept_bytes_;  ///< their contents, one after the other
};

}  // namespace gradsync::inline v0_2::detail
