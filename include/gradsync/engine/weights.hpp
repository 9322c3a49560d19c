// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/random.h>

#include <optional>

#include "options.hpp"
#include "verification.hpp"

/// Compares memory across ranks: threads must have models of their own, and all ranks must have the same weights.

namespace gradsync::inline v0_2::detail {

/// Continues a digest with `bytes` bytes, at about the speed of memory. Words go in turn through eight chains, each of
/// which is one to one in its last word; so data that differ in one word never have the same digest.
inline std::uint64_t digest_of(const std::byte* data, std::size_t bytes, std::uint64_t seed) noexcept {
    constexpr std::size_t chains = 8, word = sizeof(std::uint64_t);
    constexpr std::uint64_t prime = 0x9e3779b185ebca87u;  // one of xxHash's
    std::uint64_t chain[chains];
    for (std::uint64_t& c : chain) c = split_mix(seed);
    const auto add = [&](std::size_t c, const std::byte* from, std::size_t size) {
        std::uint64_t next = 0;
        std::memcpy(&next, from, size);
        chain[c] = std::rotl((chain[c] ^ next) * prime, 31);
    };
    std::size_t at = 0;
    for (; at + chains * word <= bytes; at += chains * word)
        for (std::size_t c = 0; c < chains; ++c) add(c, data + at + c * word, word);
    for (std::size_t c = 0; at < bytes; at += word, ++c) add(c, data + at, smaller(word, bytes - at));
    std::uint64_t all = bytes;
    for (const std::uint64_t c : chain) all = std::rotl((all ^ c) * prime, 31);
    return all;
}

/// A number that changes when host memory is written, taken away or given; its last bit is `whole`. With `whole` it
/// reads all of the memory, otherwise 8 bytes in the middle, which change if all elements are scaled or replaced.
inline std::uint64_t trace_of(const ConstBufferView& view, bool whole) noexcept {
    std::uint64_t word = 0;
    if (view.data != nullptr && view.space == MemorySpace::host) {
        const auto* const data = static_cast<const std::byte*>(view.data);
        const std::size_t size = smaller(sizeof word, view.bytes());
        if (whole) word = digest_of(data, view.bytes(), 0);
        else std::memcpy(&word, data + (view.bytes() - size) / 2, size);
        ++word;
    }
    return split_mix(word) << 1 | std::uint64_t{whole};
}

/// Checksums of gradients at their marks: see ReducerOptions::check_writes.
/// Different gradients may be used concurrently.
class WrittenGradients {
public:
    /// Does the environment ask for it?
    static bool asked_for() noexcept {
        const char* const value = std::getenv("GRADSYNC_CHECKS");
        const std::string_view name = value == nullptr ? "" : value;
        if (name.size() > 1 || (name.size() == 1 && name != "0" && name != "1"))
            write_debug_line(DebugLevel::info, -1,
                             {"GRADSYNC_CHECKS=", value, " is neither 1 nor 0; set it to 1 to check marks"});
        return name == "1";
    }
    /// `parameters`: their number, or 0 to check nothing.
    explicit WrittenGradients(std::size_t parameters) : checksums_(parameters) {}

    bool checked() const noexcept { return !checksums_.empty(); }
    void mark(std::size_t i, BufferView gradient) noexcept { checksums_[i] = trace_of(gradient, true); }
    /// Was gradient i written since its mark in this step?
    bool since_mark(std::size_t i, BufferView gradient) const noexcept {
        return checksums_[i] != 0 && checksums_[i] != trace_of(gradient, true);
    }
    void reset() noexcept { checksums_.fill(0); }

private:
    List<std::uint64_t> checksums_;  ///< by parameter; 0: no mark yet
};

/// Compares the weights of all ranks. Nothing blocks between `start` and `finish`.
/// A step that called `start` must call `finish`.
template <Backend Host>
class WeightComparison {
public:
    /// `every`: see ReducerOptions::compare_weights_every.
    explicit WeightComparison(std::size_t every) noexcept : every_(every) {}

    /// Do the ranks compare their weights in this step?
    bool is_due() const noexcept {
        return every_ != gradsync::never && (steps_ == 0 || (every_ != 0 && steps_ % every_ == 0));
    }
    /// Reads the weights through `passes`. `backend` works on host memory.
    void start(Host& backend, auto&& passes, ListView<const ParameterView> parameters) {
        own_.clear();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const bool is_given = parameters[i].value.data == nullptr && !given_.empty();
            own_.push_back(is_given ? given_[i] : digest_of_value(passes, parameters[i].value));
        }
        digest_ = digest_of(reinterpret_cast<const std::byte*>(own_.data()), own_.size() * sizeof own_[0], 0);
        exchange(backend, all_, work_);
        if (groups_) {
            groups_->set_timeout(backend.timeout());
            exchange(*groups_, of_groups_, groups_work_);
        }
    }
    /// `start` then compares, of each parameter that has no value there, the one in `given` as it is now. No-op if this
    /// step compares nothing.
    void give(auto&& passes, ListView<const ParameterView> given) {
        if (!is_due()) return;
        given_.clear();
        for (const ParameterView& p : given) given_.push_back(p.requires_grad ? digest_of_value(passes, p.value) : 0);
    }
    bool test() { return work_.test() && groups_work_.test(); }
    /// Also compares the groups of a hybrid sharding from now on. `replicas`: one rank of each group;
    /// nobody else uses this handle.
    void compare_groups(Host replicas) { groups_.emplace(std::move(replicas)); }

    /// Ends a step. Throws Error(parameter_mismatch), with the same text on every rank, if the weights that `start` has
    /// read differ.
    void finish(Host& backend, ListView<const ParameterView> parameters) {
        ++steps_;
        if (all_.empty()) return;
        work_.wait();
        groups_work_.wait();
        const List<std::uint64_t> ranks = std::exchange(all_, {}), groups = std::exchange(of_groups_, {});
        if (differ(ranks))
            compare(backend, backend, parameters, [&](std::size_t r) { return text("rank ", named_rank(backend, r)); });
        if (differ(groups)) compare(*groups_, backend, parameters, [](std::size_t r) { return text("group ", r); });
    }

private:
    void exchange(Host& ranks, List<std::uint64_t>& all, typename Host::WorkType& work) {
        all.resize(static_cast<std::size_t>(ranks.size()));
        work = ranks.all_gather(ConstBufferView(&digest_, 1), BufferView(all.data(), all.size()));
    }
    bool differ(const List<std::uint64_t>& digests) const {
        bool same = true;
        for (const std::uint64_t digest : digests) same = same && digest == digest_;
        return !same;
    }
    void compare(Host& ranks, Host& backend, ListView<const ParameterView> parameters, auto&& name_of) {
        const List<std::uint64_t> table = gather_values(ranks, own_);
        for (std::size_t i = 0; i < own_.size(); ++i)
            if (const std::string who = minority(table, i, static_cast<std::size_t>(ranks.size()), name_of);
                !who.empty()) {
                // The first rank to throw fails its communicators, so all must have the table by then.
                try {
                    backend.barrier().wait();
                    ranks.barrier().wait();
                } catch (const Error&) {  // another rank has thrown already
                }
                raise(Errc::parameter_mismatch,
                      {.operation = "finish", .rank = named_rank(backend), .parameter = parameters[i].name},
                      "the weights of '", parameters[i].name, "' differ: ", who,
                      "; call broadcast_parameters() before the first step, and step alike on all ranks (if they "
                      "differ on purpose: ReducerOptions::compare_weights_every = gs::never)");
            }
    }

    static std::uint64_t digest_of_value(auto& passes, const BufferView& value) {
        constexpr std::size_t piece_bytes = std::size_t{1} << 20;  // copied from a device at a time
        if (value.data == nullptr || value.count == 0) return 0;   // some ranks may have an address for an empty one
        if (value.space == MemorySpace::host)
            return digest_of(static_cast<const std::byte*>(value.data), value.bytes(), 0);
        std::uint64_t digest = 0;
        const std::size_t count = piece_bytes / size_of(value.dtype);
        List<std::byte> piece(smaller(piece_bytes, value.bytes()));
        for (std::size_t first = 0; first < value.count; first += count) {
            const BufferView part = value.subview(first, smaller(count, value.count - first));
            passes.read(part, piece.data());
            digest = digest_of(piece.data(), part.bytes(), digest);
        }
        return digest;
    }

    /// The ranks whose digest of parameter i is not the most frequent one; empty if all are equal.
    /// `name_of(r)`: what a rank stands for.
    [[gnu::cold]] std::string minority(const List<std::uint64_t>& table, std::size_t i, std::size_t ranks,
                                       auto&& name_of) const {
        const auto of = [&](std::size_t r) { return table[r * own_.size() + i]; };
        std::size_t usual = 0, most = 0;
        for (std::size_t r = 0; r < ranks; ++r) {
            std::size_t alike = 0;
            for (std::size_t other = 0; other < ranks; ++other) alike += std::size_t{of(other) == of(r)};
            if (alike > most) usual = r, most = alike;
        }
        std::string who;
        for (std::size_t r = 0; r < ranks; ++r)
            if (of(r) != of(usual)) who += text(who.empty() ? "" : " and ", name_of(r));
        return who.empty() ? who : text("those of ", who, " are not those of ", name_of(usual));
    }

    const std::size_t every_;
    std::size_t steps_ = 0;            ///< that are complete
    List<std::uint64_t> own_, given_;  ///< digest by parameter
    std::uint64_t digest_ = 0;
    std::optional<Host> groups_;
    List<std::uint64_t> all_, of_groups_;  ///< digest by rank and by group; empty when no comparison is in flight
    typename Host::WorkType work_, groups_work_;
};

/// A number that is equal on threads of one process, and almost never on different processes.
[[gnu::cold]] inline std::uint64_t process_number() noexcept {
    static const std::uint64_t program = [] {
        std::uint64_t random = 0;
        return ::getrandom(&random, sizeof random, 0) == sizeof random ? random : 0;
    }();
    return program + static_cast<std::uint64_t>(::getpid());  // a fork keeps `program`
}

/// Throws Error(invalid_argument), with the same text on every rank, if ranks of one process share a gradient (if
/// gradients are `borrowed`) or trainable weights. If there are very many parameters and ranks, it looks at the first
/// parameters only. Parameters are known to be alike on all ranks. Collective.
[[gnu::cold]] void check_own_memory(Backend auto& backend, ListView<const ParameterView> parameters, bool borrowed) {
    const auto ranks = static_cast<std::size_t>(backend.size());
    if (ranks == 1) return;
    constexpr std::size_t most = 65536;  // comparisons, each of one parameter on two ranks
    const auto seen = parameters.first(smaller(parameters.size(), larger(most / (ranks * ranks), std::size_t{1})));
    List<std::uint64_t> own = {process_number()};
    for (const ParameterView& p : seen)
        for (const BufferView& part : {borrowed ? p.gradient : BufferView{}, p.value})
            own.push_back(p.requires_grad && part.count != 0 ? reinterpret_cast<std::uintptr_t>(part.data) : 0);
    const List<std::uint64_t> all = gather_values(backend, own);
    for (std::size_t k = 1; k < own.size(); ++k)
        for (std::size_t r = 1; r < ranks; ++r)
            for (std::size_t other = 0; own[k] != 0 && other < r; ++other) {
                const std::uint64_t *one = &all[r * own.size()], *two = &all[other * own.size()];
                if (one[k] == 0 || one[k] != two[k] || one[0] != two[0]) continue;
                const std::string& name = seen[(k - 1) / 2].name;
                raise(Errc::invalid_argument, {.operation = "Reducer", .rank = named_rank(backend), .parameter = name},
                      "ranks ", named_rank(backend, other), " and ", named_rank(backend, r), " share the ",
                      k % 2 == 1 ? "gradient" : "weights", " of '", name,
                      "': each rank needs a model of its own; make it in the function that run_threads() calls, and "
                      "capture none by reference");
            }
}

}  // namespace gradsync::inline v0_2::detail
