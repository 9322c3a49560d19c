// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>

#include "file_store.hpp"

namespace gradsync::inline v0_2 {

/// Internal: owns a Store of any type.
class AnyStore {
public:
    template <Store S>
        requires(!std::is_same_v<S, AnyStore>)
    explicit AnyStore(S store) : model_(new Model<S>(std::move(store))) {}

    /// Opens the store of an address: a folder that exists. Throws Error(invalid_argument) for other addresses, and
    /// what the store throws.
    static AnyStore open(const std::string& address) {
        if (const std::size_t end = address.find("://"); end != std::string::npos)
            bootstrap::raise(Errc::invalid_argument,
                             bootstrap::text("there is no store of the kind ", address.substr(0, end + 3),
                                             "; name a folder that all processes of the job see"),
                             {.operation = "store"});
        return AnyStore(FileStore(address));
    }

    Blob create(std::string_view name, std::span<const std::byte> bytes) { return model_->create(name, bytes); }
    std::optional<Blob> read(std::string_view name) { return model_->read(name); }
    std::vector<std::string> names(std::string_view prefix) { return model_->names(prefix); }

private:
    struct Interface {
        virtual ~Interface() = default;
        virtual Blob create(std::string_view name, std::span<const std::byte> bytes) = 0;
        virtual std::optional<Blob> read(std::string_view name) = 0;
        virtual std::vector<std::string> names(std::string_view prefix) = 0;
    };
    template <class S>
    struct Model final : Interface {
        explicit Model(S its_store) : store(std::move(its_store)) {}
        Blob create(std::string_view name, std::span<const std::byte> bytes) override {
            return store.create(name, bytes);
        }
        std::optional<Blob> read(std::string_view name) override { return store.read(name); }
        std::vector<std::string> names(std::string_view prefix) override { return store.names(prefix); }
        S store;
    };

    std::unique_ptr<Interface> model_;
};

static_assert(Store<AnyStore>);

}  // namespace gradsync::inline v0_2
