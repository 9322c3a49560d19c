// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/parameter.hpp"
#include "../kernel/passes.hpp"

namespace gradsync::inline v0_2::detail {

/// The failure handling of one object on one rank. It refuses invalid calls, tells the other ranks of fatal errors, and
/// remembers the first failure for all later calls. A public object has one, and lends it to its engine. Thread-safe.
template <class B>
class Guard {
public:
    /// `owner`: the object as its errors name it, "this Reducer".
    Guard(const B& backend, const char* owner) : backend_(backend), owner_(owner) {}
    Guard& operator=(Guard&&) = delete;

    B& backend() noexcept { return backend_; }
    const B& backend() const noexcept { return backend_; }
    bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }

    /// See Reducer::broadcast_parameters. Collective.
    [[gnu::cold]] void broadcast_values(ListView<const ParameterView> parameters, int root) {
        List<BufferView> values;
        for (const ParameterView& p : parameters) {
            check_value(p, "broadcast_parameters");
            values.push_back(p.value);
        }
        broadcast_buffers(values, root);
    }
    /// See Reducer::broadcast_buffers. Collective.
    [[gnu::cold]] void broadcast_buffers(std::span<const BufferView> buffers, int root = 0) {
        check_usable("broadcast_buffers");
        check_root(root, "broadcast_buffers");
        for (std::size_t i = 0; i < buffers.size(); ++i) {  // before the first one starts
            const bool no_memory = buffers[i].data == nullptr && buffers[i].count != 0;
            if (no_memory || buffers[i].space != B::memory_space)
                refuse("broadcast_buffers", "buffer ", i, " of ", buffers.size(),
                       no_memory ? " has no memory; give it some"
                                 : " lies in another memory space than this backend takes; copy it there first");
        }
        run([&] {
            List<typename B::WorkType> works;
            works.reserve(buffers.size());
            for (const BufferView& b : buffers) works.push_back(backend_.broadcast(b, root));
            for (auto& work : works) await(backend_, work);
        });
    }

    /// Throws without any effect: the object stays usable. `place`: without the rank, which is this one.
    template <class... Parts>  // see Participant::refuse
    [[noreturn, gnu::always_inline]] inline void refuse(const ErrorPlace& place, const Parts&... parts) const {
        refuse_joined(Errc::invalid_argument, place, {TextPart(parts)...});
    }
    template <class... Parts>
    [[noreturn, gnu::always_inline]] inline void refuse(const char* operation, const Parts&... parts) const {
        refuse_joined(Errc::invalid_argument, {.operation = operation}, {TextPart(parts)...});
    }

    /// Gradients are lost: fails the communicator on all ranks, and throws.
    [[noreturn, gnu::cold, gnu::noinline]] void fail(Errc code, const char* operation, const std::string& what,
                                                     std::string_view parameter, std::size_t bucket) {
        remember(what, code);
        backend_.fail(what);
        refuse_joined(code,
                      {.operation = operation, .bucket = static_cast<std::ptrdiff_t>(bucket), .parameter = parameter},
                      {what});
    }

    /// Runs `f`. An exception from it is fatal to the communicator: it fails on all ranks.
    decltype(auto) run(auto&& f) {
        try {
            return f();
        } catch (...) {
            give_up();
            throw;
        }
    }

    /// Fails the communicator because of the current exception.
    [[gnu::cold, gnu::noinline]] void give_up() {
        const Handled failure = handled();
        remember(failure.what, failure.code);
        backend_.fail(what_);
    }

    void check_usable(const char* operation) const {
        if (failed()) refuse_use(operation);
    }
    void check_index(std::size_t i, std::size_t size, const char* operation, const char* what = "parameter") const {
        if (i >= size) refuse_index(i, size, operation, what);
    }
    void check_root(int root, const char* operation) const {
        if (root < 0 || root >= backend_.size())
            refuse(operation, "there is no rank ", root, " among ", backend_.size());
    }

    /// Refuses weights that have no memory.
    void check_value(const ParameterView& p, const char* operation) const {
        if (p.value.data != nullptr || p.gradient.count == 0) return;
        refuse({.operation = operation, .parameter = p.name}, p.requires_grad ? "" : "frozen ", "parameter '", p.name,
               "' has no value; give one in its ParameterView or parameter_traits");
    }

    void check_limit(double limit, const char* operation) const {
        if (!(limit >= 0)) refuse(operation, "a limit must be 0 or more, not ", limit);
    }

private:
    [[noreturn, gnu::cold, gnu::noinline]] void refuse_joined(Errc code, ErrorPlace place,
                                                              std::initializer_list<TextPart> parts) const {
        place.rank = named_rank(backend_);
        raise(code, place, place.operation, " on rank ", place.rank, ": ", join(parts));
    }
    // Out of line: a mark takes nanoseconds, and code that formats messages would keep the compiler from inlining it.
    [[noreturn, gnu::cold, gnu::noinline]] void refuse_use(const char* operation) const {
        refuse_joined(code_, {.operation = operation}, {owner_, " failed earlier and cannot go on: ", what_});
    }
    [[noreturn, gnu::cold, gnu::noinline]] void refuse_index(std::size_t i, std::size_t size, const char* operation,
                                                             const char* what) const {
        refuse(operation, what, " index ", i, " is out of range [0, ", size, ")");
    }

    /// Keeps the first failure only.
    [[gnu::cold, gnu::noinline]] void remember(const std::string& what, Errc code) {
        std::lock_guard lock(mutex_);
        if (failed()) return;
        what_ = what;
        code_ = code;
        failed_.store(true, std::memory_order_release);
    }

    B backend_;
    const char* owner_;
    std::mutex mutex_;
    std::atomic<bool> failed_{false};
    std::string what_;               ///< message of the first failure; valid after `failed()`
    Errc code_ = Errc::peer_failed;  ///< the Error's code; peer_failed for other exceptions
};

}  // namespace gradsync::inline v0_2::detail
