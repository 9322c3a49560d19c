// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>

#include "file_store.hpp"

namespace gradsync::inline v0_2 {

/// Internal: a Store whose type is not known.
class AnyStore {
public:
    virtual ~AnyStore() = default;

    /// Opens the store of an address: a folder that exists, or in programs that include etcd_store.hpp, etcd. Throws
    /// Error(invalid_argument) for other addresses, and what the store throws.
    static std::unique_ptr<AnyStore> open(const std::string& address);
    static inline std::unique_ptr<AnyStore> (*open_etcd)(const std::string& address) =
        nullptr;  ///< etcd_store.hpp sets it

    virtual Blob create(std::string_view name, std::span<const std::byte> bytes) = 0;
    virtual std::optional<Blob> read(std::string_view name) = 0;
    virtual std::vector<std::string> names(std::string_view prefix) = 0;
    /// Limits each call to a remote store. In a folder it limits `create` only; see `FileStore::set_timeout`. Returns
    /// the previous limit.
    virtual std::chrono::nanoseconds set_timeout(std::chrono::nanoseconds limit) = 0;
};

/// Internal: a Store of this type.
template <Store S>
struct StoreAs final : AnyStore {
    explicit StoreAs(const std::string& address) : store(address) {}
    Blob create(std::string_view name, std::span<const std::byte> bytes) override { return store.create(name, bytes); }
    std::optional<Blob> read(std::string_view name) override { return store.read(name); }
    std::vector<std::string> names(std::string_view prefix) override { return store.names(prefix); }
    std::chrono::nanoseconds set_timeout(std::chrono::nanoseconds limit) override {
        if constexpr (requires { store.set_timeout(limit); }) return store.set_timeout(limit);
        else return limit;
    }
    S store;
};

inline std::unique_ptr<AnyStore> AnyStore::open(const std::string& address) {
    const std::size_t end = address.find("://");
    if (end == std::string::npos) return std::make_unique<StoreAs<FileStore>>(address);
    const std::string kind = address.substr(0, end + 3);
    const bool is_etcd = kind == "etcd://" || kind == "etcds://";
    if (is_etcd && open_etcd != nullptr) return open_etcd(address);
    bootstrap::raise(Errc::invalid_argument, {.operation = "store"},
                     is_etcd ? bootstrap::text("this program cannot open a store of the kind ", kind,
                                               "; let it include gradsync/bootstrap/store/etcd_store.hpp and link "
                                               "gradsync::etcd")
                             : bootstrap::text("there is no store of the kind ", kind,
                                               "; name a folder that all processes of the job see, or "
                                               "etcd://host:2379/prefix"));
}

}  // namespace gradsync::inline v0_2
