// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include "../rendezvous.hpp"

namespace gradsync::inline v0_2 {

/// A place where the processes of a job leave words for one another, also for those that start later. A name keeps its
/// bytes for as long as the job lives: it is never changed or removed. So processes agree on something by creating it
/// under one name.
///
/// - `create(name, bytes)` puts the bytes if the name is absent. Returns the bytes that are there: its own, or those of
///   the first writer. At most `largest_blob` bytes. If it throws, the name may exist or not: call it again.
/// - `read(name)` returns the bytes, or nothing. It may be late: a name that another process has created may still seem
///   absent. The bytes that it returns are those of the first writer.
/// - `names(prefix)` lists the names that begin with it, in ascending order, and may be late, too.
///
/// A name consists of 1 to 200 letters, digits and the characters "-_./", and begins with a letter; a letter or digit
/// follows each '/'. All functions throw
/// Error(storage), which names the store, if it cannot be reached within its time limit, and Error(invalid_argument)
/// for a name or a size that is not allowed. A model need not be thread-safe.
template <class S>
concept Store = requires(S& store, std::string_view name, std::span<const std::byte> bytes) {
    { store.create(name, bytes) } -> std::same_as<Blob>;
    { store.read(name) } -> std::same_as<std::optional<Blob>>;
    { store.names(name) } -> std::same_as<std::vector<std::string>>;
};

namespace bootstrap {

/// Throws Error(invalid_argument) for what no store takes. `operation`: of the store, for the error.
inline void check_entry(std::string_view name, std::size_t bytes, const char* operation) {
    const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
    bool valid = !name.empty() && name.size() <= 200 && is_letter(name[0]);
    bool follows = false;  // on a '/'
    for (const char c : name) {
        const bool is_plain = is_letter(c) || (c >= '0' && c <= '9');
        valid = valid && (is_plain || (!follows && (c == '-' || c == '_' || c == '.' || c == '/')));
        follows = c == '/';
    }
    valid = valid && !follows;
    if (!valid)
        raise(Errc::invalid_argument, {.operation = operation}, operation, " of a store: '", name, "' is no name; ",
              "use 1 to 200 letters, digits and -_./, begin with a letter, and put a letter or digit behind each '/'");
    if (bytes > largest_blob)
        raise(Errc::invalid_argument, {.operation = operation}, operation, " of a store: ", bytes, " bytes for '", name,
              "' are more than the ", largest_blob, " that it takes");
}

}  // namespace bootstrap

}  // namespace gradsync::inline v0_2
