// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/backend.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/math.hpp"
#include "../core/parameter.hpp"

/// The checks at construction: the bucket policy made a valid plan, and all ranks synchronise
/// the same parameters in the same way.

namespace gradsync::inline v0_2::detail {

/// FNV-1a over everything added, in order.
class Digest {
public:
    void add(const void* data, std::size_t bytes) noexcept { value_ = fnv1a(data, bytes, value_); }
    void add(std::string_view text) noexcept {
        add(text.data(), text.size());
        add(std::uint64_t{text.size()});
    }
    void add(std::uint64_t number) noexcept { add(&number, sizeof number); }

    std::uint64_t value() const noexcept { return value_; }

private:
    std::uint64_t value_ = fnv1a(nullptr, 0);
};

/// Does the dtype of the values differ from that of the gradient?
inline bool has_other_values(const ParameterView& p) noexcept {
    return p.value.count != 0 && p.value.dtype != p.gradient.dtype;
}

inline std::uint64_t digest_of(const ParameterView& p) noexcept {
    Digest digest;
    digest.add(p.name);
    digest.add(std::uint64_t{p.gradient.count});
    digest.add(static_cast<std::uint64_t>(p.gradient.dtype));
    if (p.shape.size() > 1)  // one dimension is the count
        for (std::size_t extent : p.shape) digest.add(std::uint64_t{extent});
    digest.add(std::uint64_t{p.requires_grad} << 32 | p.uses);
    if (has_other_values(p)) digest.add(static_cast<std::uint64_t>(p.value.dtype));
    return digest.value();
}

inline std::uint64_t digest_of(const BucketPlan& plan) noexcept {
    Digest digest;
    for (std::size_t b = 0; b < plan.size(); ++b) {
        digest.add(plan.bucket(b).data(), plan.bucket(b).size_bytes());
        digest.add(std::uint64_t{b});
    }
    return digest.value();
}

/// "'fc.weight' f32 [10, 20]"
[[gnu::cold, gnu::noinline]] inline std::string describe(const ParameterView& p) {
    return text("'", p.name, "' ", p.gradient.dtype, " [", p.shape.empty() ? text(p.gradient.count) : joined(p.shape),
                "]", has_other_values(p) ? ", values of " : "", has_other_values(p) ? name_of(p.value.dtype) : "",
                p.requires_grad ? "" : ", frozen", p.uses == 1 ? "" : text(", used ", p.uses, " times"));
}

/// Refuses an invalid plan: each trainable parameter must be in exactly one bucket, and a bucket must have one dtype.
[[gnu::cold]] inline void check_plan(const BucketPlan& plan, ListView<const ParameterInfo> infos,
                                     ListView<const ParameterView> parameters, const std::string& policy, int rank) {
    const auto refuse = [&](std::size_t i, std::ptrdiff_t b, const auto&... what) {
        const std::string name = i < parameters.size() ? parameters[i].name : text(i);
        raise(Errc::invalid_argument, {.operation = "Reducer", .rank = rank, .bucket = b, .parameter = name},
              "Reducer on rank ", rank, ": the bucket policy ", policy, " put parameter '", name, "' in ",
              b < 0 ? "no bucket" : text("bucket ", b), what...,
              "; a policy puts each trainable parameter in exactly one bucket, and one kind() of parameters in each");
    };
    List<bool> seen(parameters.size());
    for (std::size_t at = 0; at < plan.size(); ++at) {
        const auto b = static_cast<std::ptrdiff_t>(at);
        const std::span<const std::size_t> bucket = plan.bucket(at);
        if (bucket.empty())
            raise(Errc::invalid_argument, {.operation = "Reducer", .rank = rank, .bucket = b}, "Reducer on rank ", rank,
                  ": the bucket policy ", policy, " left bucket ", b, " empty");
        for (std::size_t i : bucket) {
            if (i >= parameters.size()) refuse(i, b, ", but there is no such parameter");
            if (!parameters[i].requires_grad) refuse(i, b, ", but it is frozen");
            if (seen[i]) refuse(i, b, ", but it was in one before");
            const ParameterInfo &own = infos[i], &first = infos[bucket.front()];
            if (own.whole != first.whole)
                refuse(i, b,
                       own.whole ? " beside one that is cut, but it is whole"
                                 : " beside a whole one, but it is cut (see ParameterInfo::whole)");
            if (own.kind() != first.kind() && own.dtype == first.dtype && own.space == first.space)
                refuse(i, b, " beside values of ", first.value_dtype, ", but its own are of ", own.value_dtype);
            if (own.kind() != first.kind())
                refuse(i, b, " of ", first.dtype, ", but its gradient travels as ", own.dtype);
            seen[i] = true;
        }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].requires_grad && !seen[i]) refuse(i, -1, "");
}

/// Writes a plan to the debug log.
[[gnu::cold, gnu::noinline]] inline void debug_plan(const BucketPlan& plan, ListView<const ParameterInfo> infos,
                                                    ListView<const ParameterView> parameters, const std::string& policy,
                                                    int rank) {
    std::size_t all = 0, gradients = 0;
    for (std::size_t b = 0; b < plan.size(); ++b) {
        const std::span<const std::size_t> bucket = plan.bucket(b);
        std::size_t bytes = 0;
        for (const std::size_t i : bucket) bytes += infos[i].bytes();
        all += bytes;
        gradients += bucket.size();
        debug(DebugLevel::trace, rank, "bucket ", b, ": ", bytes, " bytes of ", infos[bucket.front()].dtype, ", ",
              bucket.size(), " gradients, from '", parameters[bucket.front()].name, "' to '",
              parameters[bucket.back()].name, "'");
    }
    debug(DebugLevel::info, rank, policy, " puts ", gradients, " gradients of ", all, " bytes into ", plan.size(),
          plan.size() == 1 ? " bucket" : " buckets");
}

/// The parts of a text that are separated by spaces outside of braces.
[[gnu::cold]] inline List<std::string> parts_of(const std::string& text) {
    List<std::string> parts(1);
    int depth = 0;
    for (const char c : text) {
        depth += c == '{' ? 1 : c == '}' ? -1 : 0;
        if (c == ' ' && depth == 0) parts.push_back({});
        else parts.back() += c;
    }
    return parts;
}

/// The parts of `text` that `other` does not have in the same place; all of it if they have different numbers of parts.
[[gnu::cold]] inline std::string differing_parts(const std::string& text, const std::string& other) {
    const List<std::string> own = parts_of(text), theirs = parts_of(other);
    if (own.size() != theirs.size()) return text;
    std::string result;
    for (std::size_t k = 0; k < own.size(); ++k)
        if (own[k] != theirs[k]) (result += result.empty() ? "" : " ") += own[k];
    return result;
}

/// Compares parameters, settings and plan over all ranks. If they differ, every rank throws
/// Error(parameter_mismatch) with the same text, which names the first parameter or setting that differs.
/// The communicator stays usable. Collective.
[[gnu::cold]] void verify(Backend auto& backend, ListView<const ParameterView> parameters, const BucketPlan& plan,
                          const std::string& settings) {
    debug(DebugLevel::info, backend.rank(), "synchronises ", parameters.size(), " parameters: ", settings);
    if (backend.size() == 1) return;
    List<std::uint64_t> digests;
    digests.reserve(parameters.size());
    Digest all;
    for (const ParameterView& p : parameters) {
        digests.push_back(digest_of(p));
        all.add(digests.back());
    }
    Digest rest;
    rest.add(settings);
    rest.add(digest_of(plan));

    const std::uint64_t own[] = {parameters.size(), all.value(), rest.value()};
    const List<std::uint64_t> seen = gather_values(backend, own);
    bool equal = true;
    std::size_t common = parameters.size();  // number of parameters that every rank has
    for (std::size_t r = 0; r < seen.size(); r += 3) {
        for (std::size_t k = 0; k < 3; ++k) equal = equal && seen[r + k] == own[k];
        common = seen[r] < common ? seen[r] : common;
    }
    if (equal) return;

    const auto report = [&](std::string_view what, std::string_view remedy, std::string_view mine,
                            std::string_view parameter, bool whole = true) {
        const List<std::string> texts = gather_texts(backend, mine);
        std::size_t r = 1;
        while (r < texts.size() && texts[r] == texts[0]) ++r;
        if (r == texts.size()) return;
        const int peer = named_rank(backend, r);
        raise(Errc::parameter_mismatch,
              {.operation = "Reducer", .rank = named_rank(backend), .peer = peer, .parameter = parameter}, what,
              " differs: rank ", named_rank(backend, 0), " has ",
              whole ? texts[0] : differing_parts(texts[0], texts[r]), ", rank ", peer, " has ",
              whole ? texts[r] : differing_parts(texts[r], texts[0]), "; ", remedy);
    };

    constexpr const char* same_order = "all ranks must register the same parameters in the same order";
    // Digests find the first parameter that differs, because there may be very many parameters.
    const List<std::uint64_t> table = gather_values(backend, {digests.data(), common});
    for (std::size_t i = 0; i < common; ++i) {
        bool same = true;
        for (std::size_t r = 0; r < table.size(); r += common) same = same && table[r + i] == table[i];
        if (!same) report(text("parameter ", i), same_order, describe(parameters[i]), parameters[i].name);
    }
    const bool more = parameters.size() > common;
    report("the number of parameters", same_order,
           text(parameters.size(), " parameters",
                more ? text(", of which ", describe(parameters[common]), " is the first extra") : ""),
           more ? parameters[common].name : "");
    report("a setting", "all ranks must construct it with the same policies and options", settings, {}, false);
    report("the bucket plan", "a bucket policy must plan alike on all ranks",
           text("the plan with the digest ", digest_of(plan)), {});
}

}  // namespace gradsync::inline v0_2::detail
