// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/bucket_plan.hpp"
#include "../core/exchange.hpp"
#include "../core/overlap_policy.hpp"

/// The policies and options of a constructor come in any order. Their concepts tell them apart.

namespace gradsync::inline v0_2::detail {

/// Not a backend, so perhaps the parameters: constructors whose first two arguments are swapped are told apart by it.
template <class T>
concept NoBackend = !requires { typename std::remove_cvref_t<T>::WorkType; };

enum class Role : std::uint8_t { other, buckets, overlap, exchange, stage, shards };

/// The role of a T. A policy that lacks a member gets the role that its other members suggest, so that the error names
/// the missing member.
template <class T, class B>
consteval Role role_of() {
    if constexpr (BucketPolicy<T> || requires { &T::plan; }) return Role::buckets;
    else if constexpr (OverlapPolicy<T> || requires { &T::bucket_full; }) return Role::overlap;
    else if constexpr (
        requires { T::traits; } || requires { typename T::template WorkType<B>; } ||
        requires { typename T::template Exchange<B>; })
        return Role::exchange;
    else if constexpr (requires { T::shards_gradients; }) return Role::stage;
    else if constexpr (requires { T::keeps_whole; }) return Role::shards;
    else return Role::other;
}

template <class B, class Default, class... Arguments>
struct ChosenType {
    using type = Default;
};
template <class B, class Default, class First, class... Rest>
struct ChosenType<B, Default, First, Rest...>
    : std::conditional_t<role_of<First, B>() == role_of<Default, B>(), std::type_identity<First>,
                         ChosenType<B, Default, Rest...>> {};

/// The first of the types that has the role of the default, or the default.
template <class B, class Default, class... Arguments>
using Chosen = typename ChosenType<B, Default, Arguments...>::type;

/// The first argument that is a T or has its role, converted to T; a default-constructed T if there is none.
template <class T, class B, class First, class... Rest>
T choose(First& first, Rest&... rest) {
    constexpr Role role = role_of<T, B>();
    if constexpr (std::same_as<First, T> || (role != Role::other && role_of<First, B>() == role)) {
        constexpr bool fits = std::same_as<First, T> || (std::convertible_to<First, T> && !std::derived_from<First, T>);
        static_assert(fits,
                      "gradsync: this argument is not of the type that the template arguments name: pass that type, or "
                      "leave the template arguments out, and they follow from the arguments");
        if constexpr (fits) return std::move(first);
    } else if constexpr (sizeof...(Rest) != 0) {
        return choose<T, B>(rest...);
    } else {
        static_assert(std::default_initializable<T>,
                      "gradsync: this policy has no default: pass the constructor one of the type that the template "
                      "arguments name");
        if constexpr (std::default_initializable<T>) return T();
    }
}

/// Compiles if each argument is the options or has one of these roles, and nothing is passed twice.
template <class B, class Options, Role... roles>
struct Accepts {
    /// Compilers print it with the type of the argument that is refused.
    template <class T>
    static constexpr bool is_option_or_policy = std::same_as<T, Options> || ((role_of<T, B>() == roles) || ...);

    template <class... Arguments>
    static consteval bool check() {
        constexpr auto count = [](Role role) { return (std::size_t{role_of<Arguments, B>() == role} + ... + 0); };
        constexpr std::size_t options = (std::size_t{std::same_as<Arguments, Options>} + ... + 0);
        static_assert((is_option_or_policy<Arguments> && ...),
                      "gradsync: this constructor takes its options and policies last, in any order, and one of these "
                      "arguments is neither: its type is the T in is_option_or_policy<T>; a policy of your own models "
                      "BucketPolicy, OverlapPolicy or ExchangePolicy");
        static_assert(options <= 1, "gradsync: pass the options once: two of these arguments are options");
        static_assert(count(Role::buckets) <= 1,
                      "gradsync: pass one bucket policy: two of these arguments are bucket policies");
        static_assert(count(Role::overlap) <= 1,
                      "gradsync: pass one overlap policy: two of these arguments are overlap policies");
        static_assert(count(Role::exchange) <= 1,
                      "gradsync: pass one exchange or compressor: two of these arguments are exchanges");
        static_assert(count(Role::stage) <= 1, "gradsync: pass one stage: Zero1, Zero2 or StepInside");
        static_assert(count(Role::shards) <= 1, "gradsync: pass WholeParameters once");
        return true;
    }
};

}  // namespace gradsync::inline v0_2::detail
